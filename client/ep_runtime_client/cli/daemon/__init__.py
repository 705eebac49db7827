"""Helps commands to ask a daemon or give it orders: options, rows, nodes."""
