"""What outlives the daemon: the file, its records, and what a restart makes of them."""
