"""Sorts rows of one device by expert and back, and reorders chunks of rows."""
