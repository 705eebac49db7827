"""`moe`: the whole layer, forward and backward, compared with plain JAX, in fresh processes."""
