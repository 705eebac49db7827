"""`ep.moe`: its call, the call's static settings, the op, and the bodies that run in the op."""
