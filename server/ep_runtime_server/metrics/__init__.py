"""What Prometheus reads of the daemon: which metrics there are, their values, and the endpoint."""
