"""`ep.moe`: its call, what is resolved once of it, the op, and the bodies that run in it."""
