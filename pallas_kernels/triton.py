"""The Triton backend of Pallas, which JAX deprecates: `plgpu` is None on a JAX that no longer has it.

The kernels then support no case, and XLA does their work.
"""

from importlib.util import find_spec

if find_spec("jax.experimental.pallas.triton") is None:
    plgpu = None
else:
    from jax.experimental.pallas import triton as plgpu

__all__ = ["plgpu"]
