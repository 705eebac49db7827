"""`moe`: the whole layer, forward and backward, beside stock JAX, each in a fresh process."""
