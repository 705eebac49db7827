"""NCCL communicators of a group: the daemon gives unique ids, and every rank's process joins.

`communicators` joins before a group of transport "nccl" is READY, because rows cross over them, and
watches them until the group closes. `beside` joins in the background, for groups with rows in
windows, which form and run without communicators.
"""
