"""Moves rows between devices: by windows, XLA's collectives, NCCL, and over several nodes."""
