"""What every room uses and what knows none: layers, meshes, dtypes, units, JAX's own state."""
