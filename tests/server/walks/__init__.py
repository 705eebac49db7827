"""What the daemon's state machines should do, said a second time and simply: sessions, windows,
groups, and the coordinator's nodes.

A step of a walk does one random thing to the daemon's objects and to the reference, and compares
what both say and in which state both are.
"""
