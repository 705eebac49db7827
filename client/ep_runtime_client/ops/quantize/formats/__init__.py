"""What a recipe makes of operands: one `Format` per recipe, one file each, in `table.py`."""
