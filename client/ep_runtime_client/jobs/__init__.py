"""Starts, watches and ends jobs of several processes on this machine, for `demo` and `bench`.

A process ends with its parent, and soon after another process failed, because XLA's own collectives
would wait for the failed one.
"""
