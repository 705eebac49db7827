"""What the commands find on this machine without a daemon: GPUs, their links, NCCL."""
