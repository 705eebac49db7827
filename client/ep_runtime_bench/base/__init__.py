"""What every bench starts from: options, routings and cases, a daemon, and how time is taken."""
