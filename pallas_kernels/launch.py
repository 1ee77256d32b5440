"""Start kernels, and describe the machine to their programs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.triton import plgpu

NUM_MULTIPROCESSORS = 132  # of an H200; a GPU with fewer or more of them runs the same programs, less evenly spread


class Shaped(Protocol):
    """Common attributes of arrays, references and descriptions of outputs."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


# A field of the records that kernels work with: jax.Array outside a kernel, Ref inside it, and jax.ShapeDtypeStruct
# where the record describes outputs.
Leaf = TypeVar("Leaf", bound=Shaped)
# A reference to an array that a kernel gets. JAX's own class `Ref` does not describe `ref.at[...]`.
Ref: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """An array [..., n N] that kernels read where an exchange of n devices left it, with other arrays beside it.

    To put it together first would take another launch. Inside a kernel it stands for a reference.
    """

    table: Any  # [L]: from `start` on the arrays of the devices, one after the other
    start: int = field(metadata={"static": True})
    part_shape: tuple[int, ...] = field(metadata={"static": True})  # (..., N)
    num_parts: int = field(metadata={"static": True})  # n

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.part_shape[:-1], self.num_parts * self.part_shape[-1]

    @property
    def dtype(self) -> Any:
        return self.table.dtype

    @property
    def at(self) -> "_Places":
        return _Places(self)

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        return plgpu.load(self.at[index])


@dataclass(frozen=True)
class _Places:
    """Indexer of references, like `at` of arrays."""

    joined: Joined

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        *sizes, size = self.joined.part_shape
        *outer, inner = index
        place = 0
        if self.joined.num_parts > 1:
            width = jnp.full_like(inner, size)
            place, inner = jax.lax.div(inner, width), jax.lax.rem(inner, width)
        for extent, i in zip(sizes, outer, strict=True):
            place = place * extent + i
        return self.joined.table.at[self.joined.start + place * size + inner]


@dataclass(frozen=True)
class Entry:
    """One entry of the first axis of an array, inside a kernel, where it stands for a reference."""

    whole: Ref
    index: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    @property
    def at(self) -> "Entry":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.whole.at[self.index, *(index if isinstance(index, tuple) else (index,))]


class _Launch(NamedTuple):
    """Static parameters of a launch. Equal launches on arrays of equal shapes are traced once."""

    kernel: Callable[..., None]
    keywords: tuple[tuple[str, Any], ...]  # of the kernel
    outputs: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each leaf
    treedef: Any  # of the outputs
    num_begun: int
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    interpret: bool


def call(
    kernel: Callable[..., None],
    outputs: Any,
    inputs: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 1,
    interpret: bool,
    begun: Any = None,
) -> Any:
    """Run `kernel(inputs, outputs)` on a grid. The kernel gets a reference to the whole of each array.

    Args:
        kernel: function of two pytrees of references, the inputs and the outputs; its options are bound by `partial`,
            as keywords that can be hashed.
        outputs: pytree of the shapes and dtypes of the results.
        inputs: pytree of arrays.
        grid: number of programs along each axis.
        num_warps: warps of 32 threads in each program.
        num_stages: loads that a loop of the kernel keeps in flight.
        interpret: run the kernel operation by operation, on any platform.
        begun: arrays that the outputs continue in place. They must be the last of the inputs.

    Returns:
        Pytree of arrays, as `outputs`.
    """
    keywords = ()
    if isinstance(kernel, partial) and not kernel.args:  # partials compare by identity
        kernel, keywords = kernel.func, tuple(kernel.keywords.items())
    leaves, treedef = jax.tree.flatten(outputs)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    sizes = len(jax.tree.leaves(begun)), grid, num_warps, num_stages, interpret
    return _launch(inputs, _Launch(kernel, keywords, shapes, treedef, *sizes))


@partial(jax.jit, static_argnums=1)
def _launch(inputs: Any, static: _Launch) -> Any:
    outputs = [jax.ShapeDtypeStruct(*leaf) for leaf in static.outputs]
    first_begun = len(jax.tree.leaves(inputs)) - static.num_begun
    (result,) = pl.pallas_call(
        partial(static.kernel, **dict(static.keywords)),
        out_shape=(out_shapes(jax.tree.unflatten(static.treedef, outputs), inputs),),
        grid=static.grid,
        compiler_params=plgpu.CompilerParams(num_warps=static.num_warps, num_stages=static.num_stages),
        input_output_aliases={first_begun + i: i for i in range(static.num_begun)},
        interpret=static.interpret,
    )(inputs)
    return result


def out_shapes(outputs: Any, inputs: Any) -> Any:
    """Return the shapes and dtypes of the outputs as `pallas_call` wants them.

    Inside `jax.shard_map` an output varies over every mesh axis that some input varies over, and must say so.
    """
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(inputs)]
    axes_type = types[0].update(varying=frozenset().union(*(t.varying for t in types)))
    return jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=axes_type), outputs)


def compute_capability() -> str | None:
    """Return the compute capability of this machine's GPU, None without a GPU."""
    return getattr(jax.devices()[0], "compute_capability", None)


def shared_bytes() -> int:
    """Return the bytes of shared memory that a program may take on this machine's GPU; without a GPU, on an H200."""
    kilobytes = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
    return 1024 * kilobytes.get(compute_capability() or "9.0", 99)


def num_multiprocessors() -> int:
    """Return the number of multiprocessors of this machine's GPU; without a GPU, of an H200."""
    return getattr(jax.devices()[0], "core_count", None) or NUM_MULTIPROCESSORS


def has_float8() -> bool:
    """Return whether this machine's GPUs convert float8_e4m3fn; without a GPU, as an H200 does."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # there are none
        return True
    return all(float(device.compute_capability) >= 8.9 for device in devices)


def is_last(arrivals: Any, sequence: Array, num_programs: Array | int, interpret: bool) -> Array:
    """Count this program as arrived; return whether it is the last of the sequence's programs to arrive.

    The last one may read the values that the others stored before they arrived.

    Args:
        arrivals: reference to [B] int32, zero before the first program arrives.
        sequence: index of the sequence, int32.
        num_programs: number of programs that work on the sequence.
        interpret: whether the kernel is interpreted.
    """
    if not interpret:
        plgpu.debug_barrier()  # all threads of this program have stored their results
    return plgpu.atomic_add(arrivals, (sequence,), jnp.int32(1)) == num_programs - 1


def runtime_zero(value: Array) -> Array:
    """Return an int32 zero that is computed from an int32 `value`.

    Where a loop starts from a constant, or a constant is stored, lowering to Triton fails: it wants a number that is
    known at run time only.
    """
    return value ^ value
