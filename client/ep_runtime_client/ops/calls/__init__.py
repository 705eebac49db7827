"""Describes one op call, equal on every device: its settings, its plan, its tokens' sharding."""
