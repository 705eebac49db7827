"""Nodes of a cluster: their identities, addresses and leases, and calls to them."""
