"""How operands lie on the mesh: their roles, the sharding rules, the collectives they cost."""
