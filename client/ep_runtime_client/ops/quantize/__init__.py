"""Quantizes rows and weights to 8 bits: scales, copies, the grouped quantize of each recipe."""
