"""`train`: a whole training step compared with plain JAX, each in a fresh process."""
