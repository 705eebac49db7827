"""Starts, watches and ends jobs of several processes on this machine, for `demo` and `bench`.

A process ends with its parent, and the others soon after one that failed, because XLA's own
collectives would wait for it.
"""
