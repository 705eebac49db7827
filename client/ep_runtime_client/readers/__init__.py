"""What a daemon's admin service says, as plain values: for commands, `Group.load` and `skew`."""
