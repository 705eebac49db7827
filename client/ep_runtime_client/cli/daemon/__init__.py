"""Parts of commands that ask a daemon or give it orders: options, rows, nodes."""
