"""Finds, starts and calls daemons.

    runtime       starts a private daemon or the node's
    addresses     checks whose directory and process it is, before a byte is sent
    transport     the two sockets: RPCs on api.sock, identity and descriptors on fd.sock
    link          heartbeats, events, connecting again after a restart
    coordination  JAX's coordination service for jobs that go on
    client        what groups ask of all that; says whether the session is over

A daemon may restart at any time: RPCs wait for it, steps do not. Messages that must reach it, but
could not yet, wait in `link` while the session lives, then in `pending_goodbyes`.
"""
