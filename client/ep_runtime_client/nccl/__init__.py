"""NCCL communicators of a group: unique ids by way of the daemon, joined by every rank's process.

`communicators` joins before a group of transport "nccl" is READY, as its rows travel over them, and
watches them until the group closes. `beside` joins in the background, for groups whose rows go
through windows: they form and run without.
"""
