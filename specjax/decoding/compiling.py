"""How XLA compiles programs of many rows: whether it cuts the sums of products into parts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.quantized import Quantized
from specjax.parallel import OnMesh
from specjax.types import Model
from specjax.validation import is_traced

# XLA cuts long sums of products on GPUs into parts, which a launch of their own adds up. Where calls have many rows,
# products with whole sums are faster, and their results join the residual stream and its norm without that launch.
WHOLE_SUMS = {"xla_gpu_experimental_force_split_k": 1}
MANY_ROWS, MANY_SLOTS = 64, 32  # rows of a call from which whole sums are faster, and slots, whose rows drafters read


@dataclass(frozen=True)
class Compiled:
    """A function under `jax.jit`, compiled in two ways."""

    usual: Any
    whole_sums: Any

    def for_rows(self, num_slots: int, num_rows: int) -> Any:
        """Return the function as it is faster in so many slots, where the calls of a target have so many rows.

        The target is one that `gains_from_whole_sums`.
        """
        return self.whole_sums if num_rows >= MANY_ROWS and num_slots >= MANY_SLOTS else self.usual


def compiled(function: Callable, **options: Any) -> Compiled:
    """Return a function that is compiled in both ways, with the options of `jax.jit`."""
    return Compiled(jax.jit(function, **options), jax.jit(function, compiler_options=WHOLE_SUMS, **options))


def gains_from_whole_sums(model: Model) -> bool:
    """Return whether programs with this target are faster with whole sums, on this machine.

    They are on one GPU with matrices of 16 bits, where XLA knows its option. Matrices with codes are multiplied by
    kernels, which have no such parts, and programs with them are slower. Other targets were not measured.
    """
    if jax.default_backend() != "gpu" or isinstance(model.apply, OnMesh):
        return False
    leaves = jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, Quantized))
    matrices = [x for x in leaves if x.ndim > 1]
    return all(not isinstance(x, Quantized) and x.dtype.itemsize == 2 for x in matrices) and is_known()


def is_under_jit() -> bool:
    """Return whether JAX traces the caller, as `jax.jit` does. A function inside has no options of the compiler."""
    return is_traced(jnp.zeros(()))


@cache
def is_known() -> bool:
    """Return whether XLA knows the option for whole sums, which is an experimental one."""
    try:
        jax.jit(lambda: 0, compiler_options=WHOLE_SUMS).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
