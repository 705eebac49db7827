"""8-bit rows and weights: scales, copies, the grouped quantize of each recipe."""
