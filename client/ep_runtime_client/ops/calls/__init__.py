"""What every device of a program agrees on: an op call, its plan, how its tokens lie."""
