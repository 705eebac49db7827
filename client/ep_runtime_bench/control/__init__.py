"""`control`, `connect` and `staging`: what the daemon costs, in time and in memory."""
