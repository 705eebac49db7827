"""Rows of one device by expert and back, and chunks of rows in another order."""
