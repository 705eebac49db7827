"""`connect()`, the session it returns, and the watchdog of a process that lost a peer."""
