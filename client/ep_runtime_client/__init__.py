"""What runs in a training process, and the command line. Users import `ep_runtime` instead."""
