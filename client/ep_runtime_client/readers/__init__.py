"""Reads daemons' admin services for commands, `Group.load` and `Group.skew`."""
