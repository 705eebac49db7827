"""The unix sockets: their callers, and descriptors sent over them."""
