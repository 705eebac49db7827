"""Helps every op to trace: finds its layer and mesh, names scopes, types varying values."""
