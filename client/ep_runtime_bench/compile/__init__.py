"""`compile`: trace and compile time of a whole model, beside stock JAX's."""
