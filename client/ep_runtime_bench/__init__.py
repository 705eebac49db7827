"""Measurements: token movement against stock collectives and memcpy, and the control plane."""
