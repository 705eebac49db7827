"""Jobs of several processes on this machine, for our own commands."""
