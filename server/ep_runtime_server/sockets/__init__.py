"""The unix sockets: who may connect, and descriptors that come and go."""
