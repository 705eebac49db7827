"""Modules and tools of the JAX ecosystem around `ep.moe`."""
