"""Moves rows between devices: by windows, XLA's collectives or NCCL, on one or several nodes."""
