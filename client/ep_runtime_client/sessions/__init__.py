"""Sessions: `connect()`, the Session it returns, and the end of a process that lost a peer.

`connect` finds or makes the one session with a daemon in `registry`, which counts `connect()` calls
and drops what a forked child inherits. A `Session` is what users hold. Behind it is an
`OpenSession`: the client of the daemon, and how groups are made, found and told of the daemon's
news. `watchdog` ends the process, with the reason on standard error, if a group ended and the
program still waits in a collective of XLA, which nothing else can end.
"""
