"""The daemon's metrics for Prometheus: their catalogue, their values, and the endpoint."""
