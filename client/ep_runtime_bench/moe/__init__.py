"""`moe`: the whole layer, forward and backward, compared with stock JAX, in fresh processes."""
