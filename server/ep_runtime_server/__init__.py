"""The daemon, which owns sessions, groups, layers and their memory. Never imports JAX."""
