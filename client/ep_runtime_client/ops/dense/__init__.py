"""A product without groups, by the same rules and recipes."""
