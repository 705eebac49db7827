"""Layers, meshes, dtypes and JAX's state for all other folders, none of which it imports."""
