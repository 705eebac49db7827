"""Memory of windows and boards: devices, allocation, holders and release."""
