"""Windows and boards: their devices, holders and release."""
