"""`dispatch` and `combine` on CPU and GPUs, compared with plain copies and the link's bandwidth."""
