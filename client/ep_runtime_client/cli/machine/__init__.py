"""Reads GPUs and their links from this machine, without a daemon."""
