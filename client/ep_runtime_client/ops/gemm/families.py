"""All kernels of the CUDA library for grouped GEMMs, in the order in which they are asked."""

from __future__ import annotations

from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32
from ep_runtime_client.ops.gemm.product import GemmKernels, Product

FAMILIES = (kernels_16.KERNELS, kernels_32.KERNELS, kernels_8.KERNELS)


def kernels_of(product: Product) -> GemmKernels | None:
    """Whose kernels take a product; None: nobody's."""
    return next((each for each in FAMILIES if each.takes(product)), None)
