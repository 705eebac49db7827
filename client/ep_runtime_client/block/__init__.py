"""The MoE block: its call, its parameters and where they lie, and the flax modules around it."""
