"""`train`: a whole training step beside stock JAX, each in a fresh process."""
