"""Formats that recipes store operands in: one `Format` per recipe, one file each."""
