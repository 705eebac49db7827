"""Rates, shares of time and loads of experts for `top`, `load` and `skew`."""
