"""The daemon's unix sockets, the processes that connect, and descriptors sent over them."""
