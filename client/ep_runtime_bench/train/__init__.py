"""`train`: a whole training step compared with stock JAX, each in a fresh process."""
