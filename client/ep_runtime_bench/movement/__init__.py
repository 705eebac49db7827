"""`dispatch` and `combine`: on CPU and on GPUs, beside stock JAX, plain copies and the link."""
