"""Nodes of a cluster: their identities and addresses, and whether they live."""
