"""Helps every op to trace: the layer and mesh around it, scopes, varying types."""
