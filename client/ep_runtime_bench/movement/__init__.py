"""`dispatch` and `combine`: on CPU and on GPUs, beside plain copies and the link."""
