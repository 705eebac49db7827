"""Sessions: `connect()`, the Session it returns, and the end of a process that lost a peer.

`connect` finds or makes the one session with a daemon in `registry`, which counts `connect()` calls
and drops sessions that a forked child inherits. Users have a `Session`. Behind it is an
`OpenSession`: the client of the daemon, which also creates and finds groups and handles the
daemon's events. If a group ended and the program still waits in an XLA collective, which nothing
else can end, `watchdog` ends the process, with the reason on standard error.
"""
