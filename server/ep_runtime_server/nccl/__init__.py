"""NCCL unique ids, which separate processes make."""
