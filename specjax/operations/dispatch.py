"""The choice between the two implementations of an operation: by XLA, or by Pallas kernels.

Every public operation that has kernels takes `implementation`:

* None: the kernels on NVIDIA GPUs, for cases that they can run and gain by, and XLA for everything else;
* "xla": XLA, everywhere;
* "pallas": the kernels; an error where they cannot run the case or there is no NVIDIA GPU;
* "interpret": the kernels, interpreted operation by operation on any platform, for tests.

A named implementation never falls back to another one. Derivatives are XLA's, whatever the implementation: kernels have
none, so that a program that differentiates an operation computes it by XLA.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from pallas_kernels.rows import Rows
from pallas_kernels.triton import plgpu
from specjax.types import Categorical
from specjax.validation import suggestion

SMALL_VOCAB = 2048  # tokens; below it a few fused operations of XLA are as fast as the kernels


def dispatch(
    operands: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    pallas: Callable[..., Any],
    reason: Callable[..., str | None],
    is_worthwhile: Callable[..., bool] | None = None,
    implementation: str | None = None,
) -> Any:
    """Run an operation by XLA or by Pallas kernels.

    The kernels are chosen here, by shapes and dtypes, because `jax.lax.platform_dependent` traces the branches of every
    platform. Operands with symbolic dimensions, as `jax.export` knows them, are left to XLA, and so are operands that
    XLA may spread over several devices, since it would gather them on each device for a kernel.

    Args:
        operands: pytrees of arrays.
        xla: function of the operands.
        pallas: function of the operands and `interpret`, a bool.
        reason: function of the operands: why the kernels cannot run this case, or None where they can.
        is_worthwhile: function of the operands: whether the kernels are faster than XLA. None is always.
        implementation: None, "xla", "pallas" or "interpret".

    Returns:
        The result of `xla` or `pallas`.

    Raises:
        ValueError: for any other implementation.
        NotImplementedError: where the named kernels cannot run the case.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return xla(*operands)
    lacking = _general_reason(operands) or reason(*operands)
    if implementation is not None:
        if lacking is not None:
            raise NotImplementedError(f"implementation={implementation!r} cannot run this case: {lacking}")
        return _differentiable(partial(pallas, interpret=implementation == "interpret"), xla)(*operands)
    if lacking is not None or is_partitioned(operands) or not (is_worthwhile is None or is_worthwhile(*operands)):
        return xla(*operands)
    by_kernels = _differentiable(partial(pallas, interpret=False), xla)
    return jax.lax.platform_dependent(*operands, cuda=by_kernels, default=xla)


def _differentiable(kernels: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes by kernels, and where it is differentiated by XLA."""
    function = jax.custom_jvp(kernels)

    @partial(function.defjvp, symbolic_zeros=True)
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, treedef = jax.tree.flatten(primals)
        directions = jax.tree.leaves(tangents)
        moving = [i for i, one in enumerate(directions) if not isinstance(one, SymbolicZero)]

        def of_moving(*given: Any) -> Any:
            changed = dict(zip(moving, given, strict=True))
            return xla(*jax.tree.unflatten(treedef, [changed.get(i, leaf) for i, leaf in enumerate(leaves)]))

        return jax.jvp(of_moving, [leaves[i] for i in moving], [directions[i] for i in moving])

    return function


def _general_reason(operands: tuple[Any, ...]) -> str | None:
    """Return why no kernel can run with these operands, or None."""
    if plgpu is None:
        return f"the kernels need the Triton backend of Pallas, which jax {jax.__version__} does not have"
    if not has_static_shape(operands):
        return "the kernels take static shapes, got a symbolic one"
    return None


def check_implementation(implementation: str | None) -> None:
    """Raise ValueError unless `implementation` is one that `dispatch` knows."""
    names = "xla", "pallas", "interpret"
    if implementation not in (None, *names):
        hint = suggestion(implementation, names)
        raise ValueError(f"implementation must be None, 'xla', 'pallas' or 'interpret', got {implementation!r}{hint}")


def has_static_shape(operands: Any) -> bool:
    """Return whether all dimensions of all arrays in a pytree are numbers."""
    return all(isinstance(size, int) for x in jax.tree.leaves(operands) for size in jax.typeof(x).shape)


def is_partitioned(operands: Any) -> bool:
    """Return whether XLA may spread an array of a pytree over several devices.

    It may where the array lies on a mesh that has an axis of two devices or more which `jax.shard_map` has not taken.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def as_rows(distribution: Categorical) -> Rows:
    """Return a distribution as the kernels read it."""
    logits, temperature, min_logit, log_normalizer, rows, _ = distribution
    return Rows(logits, temperature, min_logit, log_normalizer, rows)
