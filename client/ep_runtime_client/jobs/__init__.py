"""Jobs of several processes on this machine, for `demo` and `bench`: started, watched, ended.

A process ends with its parent, and the others soon after one that failed, because XLA's own
collectives would wait for it.
"""
