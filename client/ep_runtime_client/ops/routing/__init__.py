"""Chooses the experts of each token, and computes the router's matmul."""
