"""Code of training processes, and the command line. Users import `ep_runtime` instead."""
