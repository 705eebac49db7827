"""Formats in which recipes store operands: one `Format` per recipe, one file each."""
