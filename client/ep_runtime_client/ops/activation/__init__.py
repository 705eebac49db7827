"""The experts' activation, of 16- and 32-bit rows and of 8-bit ones."""
