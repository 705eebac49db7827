"""Multiplies without groups of experts, by the same sharding rules and recipes."""
