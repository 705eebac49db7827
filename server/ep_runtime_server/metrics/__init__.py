"""The daemon's metrics for Prometheus: their catalogue, values and HTTP endpoint."""
