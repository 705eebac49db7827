"""Layers, meshes, dtypes and JAX's state, for all other folders; it imports none of them."""
