"""The ops, one folder per family; `ep` exports those that users call.

Shape letters in every docstring: T tokens (global), B batch, S sequence, H hidden, M expert FFN
width, K top-k, E experts (global), L experts on one rank, N ranks of one EP group, R slabs (one
per shard of the tokens), C rows of one slab.
"""
