"""Layers, meshes, dtypes and JAX's state, for all other rooms; imports none of them."""
