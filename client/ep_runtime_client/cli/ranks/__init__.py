"""What `top`, `load` and `skew` make of the boards: rates, shares of time, loads of experts."""
