"""NCCL communicators of a group: ids by way of the daemon, joined now or in the background."""
