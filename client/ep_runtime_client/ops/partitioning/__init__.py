"""Shards operands over the mesh: roles of axes, sharding rules, and the collectives they need."""
