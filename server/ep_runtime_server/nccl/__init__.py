"""NCCL unique ids, made by processes of their own."""
