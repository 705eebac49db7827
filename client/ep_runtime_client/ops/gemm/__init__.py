"""Grouped matmuls: the op, its gradients, plain JAX, and the GPU kernels by width."""
