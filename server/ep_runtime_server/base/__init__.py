"""What every room uses: time, turns of the loop, events and logs, systemd, bounds."""
