"""`ep.distributed`: a training job that goes on when one of its processes dies."""

from ep_runtime_client.distributed.fit_mesh import FittedMesh as FittedMesh
from ep_runtime_client.distributed.fit_mesh import fit_mesh as fit_mesh
from ep_runtime_client.distributed.state import State as State

__all__ = ["FittedMesh", "State", "fit_mesh"]


def __dir__() -> list[str]:
    return __all__
