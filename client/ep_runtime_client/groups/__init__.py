"""A group: what a caller says of it, how it forms, its layers, its memory, what became of it."""
