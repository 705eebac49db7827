"""Which nodes a cluster has: who they are, how they are reached, whether they live."""
