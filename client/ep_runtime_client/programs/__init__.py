"""What is asked of a compiled program: its collectives, what remat keeps, how it failed."""
