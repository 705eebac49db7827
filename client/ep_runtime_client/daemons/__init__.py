"""Daemons as a process reaches them: where they are, how one is started, what is said to it."""
