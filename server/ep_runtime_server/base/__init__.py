"""Modules that all other folders use: time, pacing, events, logs, systemd and limits."""
