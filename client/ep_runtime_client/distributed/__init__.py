"""`ep.distributed`: a training job that goes on when one of its processes dies."""

from ep_runtime_client.distributed.fit_mesh import FittedMesh as FittedMesh
from ep_runtime_client.distributed.fit_mesh import fit_mesh as fit_mesh

__all__ = ["FittedMesh", "fit_mesh"]


def __dir__() -> list[str]:
    return __all__
