"""How the commands ask a daemon, or break something of it: rows, nodes, options in common."""
