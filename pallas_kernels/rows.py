"""What every kernel shares: rows of logits as they are read inside a kernel, and the call that starts one."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import AxisType

from pallas_kernels.triton import plgpu

BLOCK_SIZE = 512  # tokens of a block of the vocabulary: draws choose a block first, then a token inside it
LARGE_READ = 9e7  # bytes; 21 microseconds on an H200
LOG2_E = math.log2(math.e)


class Rows(NamedTuple):
    """Distributions softmax(logits / temperature) over what is kept; outside kernels arrays, inside references."""

    logits: Array  # [B, T, V], or [R, V] with rows
    temperature: Array | None = None  # [B]; None is 1; 0 puts all mass on the argmax
    min_logit: Array | None = None  # [B, T] or [R]: the smallest kept logit
    log_normalizer: Array | None = None  # [B, T] or [R]: logsumexp of the kept logits / temperature
    rows: Array | None = None  # [B, T] int32: row (b, t) is logits[rows[b, t]]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.logits.shape[:2] if self.rows is None else self.rows.shape

    def at(self, sequence: Array, position: Array) -> tuple[Array, ...]:
        """Where a row lies, for `load`."""
        if self.rows is None:
            return sequence, position
        row = plgpu.load(self.rows.at[sequence, position])
        return (jnp.clip(row, 0, self.logits.shape[0] - 1).astype(jnp.int32),)  # it may mean nothing past the drafts

    def load(self, at: tuple[Array, ...], ids: Array, where: Array | None = None) -> Array:
        """Logits of tokens in float32; -inf for ids of V and more, below the cut, and where `where` is false."""
        mask = ids < self.vocab_size if where is None else (ids < self.vocab_size) & where
        logits = plgpu.load(self.logits.at[*at, ids], mask=mask, other=-jnp.inf).astype(jnp.float32)
        if self.min_logit is None:
            return logits
        cut = plgpu.load(self.min_logit.at[at]).astype(jnp.float32)
        return jnp.where(logits >= cut, logits, -jnp.inf)

    def load_temperature(self, sequence: Array) -> Array:
        """float32, 1 where there is none."""
        if self.temperature is None:
            return jnp.float32(1)
        return plgpu.load(self.temperature.at[sequence]).astype(jnp.float32)


class Verdict(NamedTuple):
    """What is emitted of T rows a sequence."""

    tokens: Array  # [B, T] int32, -1 after the last
    num_accepted: Array | None  # [B] int32 accepted drafts
    log_probs: Array | None  # [B, T] float32 of each token under the target


def in_parts(rows: Rows, num_rows: int) -> list[tuple[int, int]]:
    """The first and the end of parts of the rows of a sequence that are read one after the other.

    The second part costs two launches, and saves its rows of the sequences that reject a draft of the first.
    """
    read = rows.shape[0] * num_rows * rows.vocab_size * rows.logits.dtype.itemsize
    if num_rows > 2 and read >= LARGE_READ:
        return [(0, 2), (2, num_rows)]
    return [(0, num_rows)]


def in_blocks(tile: Array, tile_size: int, dtype: jnp.dtype) -> tuple[list[Array], Array]:
    """Ids of the N blocks of a tile, as parts [N, width] of each block, and the blocks [N].

    A row of a part is what one warp reads at once, 16 bytes a thread: a block is reduced without other warps, and with
    half the shuffles of a block that two warps share.
    """
    width = min(BLOCK_SIZE, 32 * 16 // jnp.dtype(dtype).itemsize)
    num_blocks = tile_size // BLOCK_SIZE
    block, inside = (jax.lax.broadcasted_iota(jnp.int32, (num_blocks, width), axis) for axis in range(2))
    first = tile * tile_size + block * BLOCK_SIZE + inside
    parts = [first + start for start in range(0, BLOCK_SIZE, width)]
    return parts, tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)


def block_max(parts: list[Array]) -> Array:
    """Maximum [N] of each block; where there is a NaN, of the others on a GPU and -inf interpreted."""
    top = jnp.max(functools.reduce(jnp.maximum, parts), axis=1)
    return jnp.where(top > -jnp.inf, top, -jnp.inf)


def block_sum(parts: list[Array]) -> Array:
    """Sum [N] of each block."""
    return jnp.sum(functools.reduce(jnp.add, parts), axis=1)


def over_blocks(of_block: Array, part: Array) -> Array:
    """One number a block [N] as one an id of a part [N, width]."""
    return jnp.broadcast_to(of_block[:, None], part.shape)


def default_tile_size(num_rows: int, vocab_size: int, largest: int = 8192) -> int:
    """Tokens a program: many, so that loads are in flight, but few enough that a small batch fills the device.

    At B = 8, bfloat16, 40 rows of 128256 take 5.9 microseconds in tiles of 4096, 6.4 of 8192 and 7.1 of 16384.
    """
    tile_size = largest
    while tile_size > 2048 and num_rows * pl.cdiv(vocab_size, tile_size) < 1024:
        tile_size //= 2
    return min(tile_size, pl.next_power_of_2(vocab_size))


def tile_of_blocks(num_rows: int, vocab_size: int) -> int:
    """`default_tile_size` where every block counts: whole blocks, and fewer, since more is kept of each."""
    return max(BLOCK_SIZE, default_tile_size(num_rows, vocab_size, largest=4096))


def inverse(temperature: Array) -> Array:
    """1 / temperature, 1 for greedy rows."""
    return 1 / jnp.where(temperature > 0, temperature, 1)


def finite(top: Array) -> Array:
    """A maximum, 0 if it is infinite, so that subtracting it gives no NaN: of nothing, or of a token that takes all."""
    return jnp.where(jnp.abs(top) < jnp.inf, top, 0)


def exp(logits: Array, scale: Array, log_mass: Array | float = 0, *, flush: bool = False) -> Array:
    """exp(logits * scale - log_mass), in the base that the hardware has.

    With `flush` results below 2**-126 are 0, which takes one instruction and not four (two rows of 256 sequences in
    bfloat16: 37.7 microseconds and not 42.5); interpreted kernels cannot.
    """
    exponent = logits * (scale * LOG2_E) - log_mass * LOG2_E
    if not flush:
        return jnp.exp2(exponent)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[exponent],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(exponent.shape, exponent.dtype)],
    )
    return result


def first_above(weights: Array, uniform: Array) -> Array:
    """First index at which the running sum of weights [N] exceeds uniform * mass; never one of weight 0."""
    total = jnp.cumsum(weights)
    mass = jnp.max(total)
    bound = jnp.minimum(uniform * mass, jnp.nextafter(mass, jnp.float32(0)))
    index = jax.lax.iota(jnp.int32, weights.shape[0])
    last = jnp.max(jnp.where(weights > 0, index, 0))
    return jnp.min(jnp.where((weights > 0) & (total > bound), index, last))


def count_drafts(tokens, num_tokens, sequence: Array) -> Array:
    """Number of drafts of a sequence: up to the first negative id, at most its `num_tokens` (a reference, or None)."""
    width = tokens.shape[1]
    index = jax.lax.iota(jnp.int32, pl.next_power_of_2(width))
    ids = plgpu.load(tokens.at[sequence, index], mask=index < width, other=-1)
    count = jnp.min(jnp.where(ids < 0, index, width))
    if num_tokens is not None:
        count = jnp.maximum(jnp.minimum(count, plgpu.load(num_tokens.at[sequence]).astype(jnp.int32)), 0)
    return count


def is_partitioned(*arrays: Array) -> bool:
    """Whether XLA may spread one of these over several devices: it would gather it for a kernel, each time."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def out_shapes(outputs: Any, inputs: Any) -> Any:
    """Shapes and dtypes of the outputs, which inside shard_map vary over all axes that an input varies over."""
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(inputs)]
    axes_type = types[0].update(varying=frozenset().union(*(t.varying for t in types)))
    return jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=axes_type), outputs)


def shared_bytes() -> int:
    """Shared memory that a program may take on this machine's GPU; without one, on an H200."""
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    kilobytes = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
    return 1024 * kilobytes.get(capability, 99)


def is_last(arrivals, sequence: Array, num_programs: Array | int, interpret: bool) -> Array:
    """Count this program in; true for the last of so many, which may read what the others stored before.

    `arrivals` is a reference [B] int32, zero before the first.
    """
    if not interpret:
        plgpu.debug_barrier()  # of this program's threads
    return plgpu.atomic_add(arrivals, (sequence,), jnp.int32(1)) == num_programs - 1


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
    """Run `kernel(inputs, outputs)`, both of references, over a grid. Whole arrays in, whole arrays out.

    With `begun`, which is the last of the inputs, the outputs continue those arrays in place.
    """
    num_begun = len(jax.tree.leaves(begun))
    first_begun = len(jax.tree.leaves(inputs)) - num_begun
    (result,) = pl.pallas_call(
        kernel,
        out_shape=(out_shapes(outputs, inputs),),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases={first_begun + i: i for i in range(num_begun)},
        interpret=interpret,
    )(inputs)
    return result
