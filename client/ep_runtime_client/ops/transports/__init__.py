"""What moves rows on a device: windows, XLA's collectives, NCCL, and nodes of several."""
