"""Computes the experts' activation, in 16 or 32 bits or quantized to 8."""
