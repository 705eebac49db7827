"""Time, pacing, events, logs, systemd and limits, for all other folders."""
