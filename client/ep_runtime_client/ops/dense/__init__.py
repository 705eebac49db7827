"""Multiplies without groups of experts, with the same sharding rules and recipes."""
