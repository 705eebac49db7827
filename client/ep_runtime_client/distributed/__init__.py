"""`ep.distributed`: a training job that goes on when one of its processes dies."""

from ep_runtime_client.distributed.fit_mesh import FittedMesh, fit_mesh
from ep_runtime_client.distributed.loop import Generation, generations
from ep_runtime_client.distributed.start import initialize
from ep_runtime_client.distributed.state import State

__all__ = ["FittedMesh", "Generation", "State", "fit_mesh", "generations", "initialize"]


def __dir__() -> list[str]:
    return __all__
