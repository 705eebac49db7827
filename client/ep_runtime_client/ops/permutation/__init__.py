"""Sorts rows by expert on one device and back, and reorders chunks of rows."""
