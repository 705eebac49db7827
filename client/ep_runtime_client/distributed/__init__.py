"""`ep.distributed`: a training job that goes on when one of its processes dies."""

from ep_runtime_client.distributed.fit_mesh import FittedMesh as FittedMesh
from ep_runtime_client.distributed.fit_mesh import fit_mesh as fit_mesh
from ep_runtime_client.distributed.loop import Generation as Generation
from ep_runtime_client.distributed.loop import generations as generations
from ep_runtime_client.distributed.start import initialize as initialize
from ep_runtime_client.distributed.state import State as State

__all__ = ["FittedMesh", "Generation", "State", "fit_mesh", "generations", "initialize"]


def __dir__() -> list[str]:
    return __all__
