"""Windows and boards: where they lie, who holds them, when they are freed."""
