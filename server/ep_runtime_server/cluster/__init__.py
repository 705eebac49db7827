"""Forming groups across nodes: claims, views, and messages between daemons."""
