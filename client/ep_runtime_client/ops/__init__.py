"""Token movement: what a model author imports.

Shape letters in every docstring: T tokens (global), B batch, S sequence, H hidden, M expert FFN
width, K top-k, E experts (global), L experts on one rank, N ranks of one EP group, R slabs (one
per shard of the tokens), C rows of one slab.
"""

from ep_runtime_client.ops.combine import combine as combine
from ep_runtime_client.ops.dispatch import dispatch as dispatch
from ep_runtime_client.ops.permutation import Permuted as Permuted
from ep_runtime_client.ops.permutation import permute as permute
from ep_runtime_client.ops.permutation import unpermute as unpermute
from ep_runtime_client.ops.plan import Dispatched as Dispatched
from ep_runtime_client.ops.plan import Plan as Plan
from ep_runtime_client.ops.prepare import prepare as prepare
from ep_runtime_client.ops.routing import Routing as Routing
from ep_runtime_client.ops.routing import aux_loss as aux_loss
from ep_runtime_client.ops.routing import pad_tokens as pad_tokens
from ep_runtime_client.ops.routing import route as route
from ep_runtime_client.ops.routing import update_expert_bias as update_expert_bias
from ep_runtime_client.ops.sort_chunks import sort_chunks as sort_chunks
