"""Rows of logits as kernels read them, and the arithmetic on rows that several kernels share."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import Leaf, Ref
from pallas_kernels.triton import plgpu

BLOCK_SIZE = 512  # tokens in a block of the vocabulary: a draw chooses a block first, then a token inside it
LARGE_READ = 9e7  # bytes of logits from which on a second pass over the rows of later drafts pays
LOG2_E = math.log2(math.e)


class Rows(NamedTuple, Generic[Leaf]):
    """The distributions softmax(logits / temperature) of T rows for each of B sequences, over the logits that are kept.

    The fields are arrays outside a kernel, and references to these arrays inside.
    """

    logits: Leaf  # [B, T, V] float32, bfloat16 or float16, or [R, V] with `rows`
    temperature: Leaf | None = None  # [B]; None is 1; 0 puts all mass on the argmax
    min_logit: Leaf | None = None  # [B, T] or [R]: the smallest logit that is kept
    log_normalizer: Leaf | None = None  # [B, T] or [R]: logsumexp of the kept logits / temperature
    rows: Leaf | None = None  # [B, T] int32: row (b, t) is logits[rows[b, t]]
    first_id: Leaf | None = None  # [1] int32: the first id of a part of a vocabulary; None: the vocabulary is whole

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of sequences and of rows per sequence, (B, T)."""
        batch_size, num_rows = self.logits.shape[:2] if self.rows is None else self.rows.shape
        return batch_size, num_rows

    def locate(self: "Rows[Ref]", sequence: Array, position: Array) -> tuple[Array, ...]:
        """Return the index of a row in `logits`, for `load`."""
        if self.rows is None:
            return sequence, position
        row = plgpu.load(self.rows.at[sequence, position])
        # Past the drafts of a sequence `rows` may hold any number.
        by_row = self.logits if self.logits is not None else self.log_normalizer  # some kernels get no logits
        assert by_row is not None, "one of them is given"
        return (jnp.clip(row, 0, by_row.shape[0] - 1).astype(jnp.int32),)

    def whole_ids(self: "Rows[Ref]", index: Array) -> Array:
        """Return the ids of tokens, given their places in the logits."""
        return index if self.first_id is None else index + self.first_id[0]

    def load(
        self: "Rows[Ref]", at: tuple[Array, ...], ids: Array, where: Array | None = None, *, keeps_nan: bool = False
    ) -> Array:
        """Load the logits of tokens of the row `at`, in float32.

        They are -inf for ids outside the vocabulary, or this part of it, for tokens that are not kept, for NaN unless
        `keeps_nan`, and where `where` is false.
        """
        mask = None
        if self.first_id is not None:
            ids = ids - self.first_id[0]
            mask = ids >= 0
        for also in (ids < self.vocab_size, where):
            mask = also if mask is None else mask if also is None else mask & also
        logits = plgpu.load(self.logits.at[*at, ids], mask=mask, other=-jnp.inf).astype(jnp.float32)
        if self.min_logit is None:
            return logits if keeps_nan else without_nan(logits)
        cut = plgpu.load(self.min_logit.at[at]).astype(jnp.float32)
        return jnp.where(logits >= cut, logits, -jnp.inf)

    def load_temperature(self: "Rows[Ref]", sequence: Array) -> Array:
        """Load the temperature of a sequence in float32; it is 1 where there are no temperatures."""
        if self.temperature is None:
            return jnp.float32(1)
        return plgpu.load(self.temperature.at[sequence]).astype(jnp.float32)


class Batch(NamedTuple, Generic[Leaf]):
    """The drafts of B sequences and the distributions that they are verified against."""

    tokens: Leaf | None  # [B, K] int32 draft tokens, -1 where a sequence has fewer; None: there are no drafts
    num_tokens: Leaf | None  # [B] int32, at most so many of the drafts count; None: all of them
    bonus_tokens: Leaf | None  # [B] int32, emitted after full acceptance; None: a token is drawn
    target: Rows[Leaf]  # K+1 rows a sequence
    draft: Rows[Leaf] | None  # K rows a sequence; None: the drafts are deterministic

    @property
    def num_drafts(self) -> int:
        """K, the width of the drafts; 0 without drafts."""
        return 0 if self.tokens is None else self.tokens.shape[1]


class Verdict(NamedTuple, Generic[Leaf]):
    """Outputs of the verification of a batch with K+1 rows a sequence."""

    tokens: Leaf  # [B, K+1] int32: accepted drafts, one more token, which is `marked`, then -1
    num_accepted: Leaf | None  # [B] int32 number of accepted drafts
    log_probs: Leaf | None  # [B, K+1] float32 log-probability of each token under the target


def unsupported_dtype(name: str, logits: Array) -> str | None:
    """Return why kernels cannot read logits of this dtype, or None."""
    if logits.dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        return None
    return f"the kernels take {name} of dtype float32, bfloat16 or float16, got {logits.dtype}"


def in_parts(rows: Rows[Array], num_rows: int) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of rows of a sequence that are read one range after the other.

    A second range costs two more launches; it is read only for sequences that accepted the whole first range.
    """
    read = rows.shape[0] * num_rows * rows.vocab_size * rows.logits.dtype.itemsize
    if num_rows > 2 and read >= LARGE_READ:
        return [(0, 2), (2, num_rows)]
    return [(0, num_rows)]


def in_blocks(tile: Array, tile_size: int, dtype: jnp.dtype) -> tuple[list[Array], Array]:
    """Split a tile of the vocabulary into blocks.

    A part holds some tokens of every block. Its rows are as wide as one load of a warp, 16 bytes a thread: a block is
    then reduced by one warp alone, with half the shuffles that a block shared by two warps would take.

    Args:
        tile: index of the tile.
        tile_size: tokens in a tile, a multiple of BLOCK_SIZE.
        dtype: of the logits that will be loaded.

    Returns:
        The token ids [N, width] of each part, and the indices [N] of the N blocks of the tile.
    """
    width = min(BLOCK_SIZE, 32 * 16 // jnp.dtype(dtype).itemsize)
    num_blocks = tile_size // BLOCK_SIZE
    block, inside = (jax.lax.broadcasted_iota(jnp.int32, (num_blocks, width), axis) for axis in range(2))
    first = tile * tile_size + block * BLOCK_SIZE + inside
    parts = [first + start for start in range(0, BLOCK_SIZE, width)]
    return parts, tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)


def block_max(parts: Sequence[Array]) -> Array:
    """Return the maximum [N] of each block of parts [N, width].

    In a block that holds a NaN, it is the maximum of the other numbers on a GPU, and -inf in an interpreted kernel.
    """
    top = jnp.max(functools.reduce(jnp.maximum, parts), axis=1)
    return jnp.where(top > -jnp.inf, top, -jnp.inf)


def block_sum(parts: Sequence[Array]) -> Array:
    """Return the sum [N] of each block of parts [N, width]."""
    return jnp.sum(functools.reduce(jnp.add, parts), axis=1)


def over_blocks(of_block: Array, part: Array) -> Array:
    """Broadcast one number per block [N] to the shape [N, width] of a part."""
    return jnp.broadcast_to(of_block[:, None], part.shape)


def default_tile_size(num_rows: int, vocab_size: int, largest: int = 8192) -> int:
    """Choose how many tokens of a row a program reads, a power of two.

    Large tiles keep many loads in flight; small ones make enough programs of a small batch to fill the device.
    """
    tile_size = largest
    while tile_size > 2048 and num_rows * pl.cdiv(vocab_size, tile_size) < 1024:
        tile_size //= 2
    return min(tile_size, pl.next_power_of_2(vocab_size))


def tile_of_blocks(num_rows: int, vocab_size: int) -> int:
    """Choose a tile size that is a multiple of BLOCK_SIZE.

    It is smaller than the default one, as a kernel that stores a number for every block needs more registers.
    """
    return max(BLOCK_SIZE, default_tile_size(num_rows, vocab_size, largest=4096))


def inverse(temperature: Array) -> Array:
    """Return 1 / temperature, and 1 for greedy rows, which have temperature 0."""
    return 1 / jnp.where(temperature > 0, temperature, 1)


def without_nan(logits: Array) -> Array:
    """Return logits with -inf in place of NaN."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def twice_where_nan(
    compute: Callable[[list[Array]], tuple[Array, ...]], parts: list[Array], mass_of: Callable[..., Array]
) -> tuple[Array, ...]:
    """Return `compute(parts)`, or `compute` of the parts without NaN where there is a NaN.

    To look at each logit takes a tenth of the time of a kernel that reads them once. A NaN shows in the sum of the
    weights.

    Args:
        compute: function of logits, in parts.
        parts: the logits as they were loaded.
        mass_of: function of what `compute` returns to a sum of weights [], which is NaN where a logit is.
    """
    found = compute(parts)
    return jax.lax.cond(
        jnp.isnan(mass_of(*found)), lambda: compute([without_nan(part) for part in parts]), lambda: found
    )


def marked(token: Array, is_empty: Array) -> Array:
    """Return a token, as a number below -1 where its row is empty: no token counts there, and this one is some id.

    No draft equals such a number, and verifications tell by it that the row was empty.
    """
    return jnp.where(is_empty, -2 - token, token)


def unmarked(token: Array) -> Array:
    """Return the token that was `marked`."""
    return jnp.where(token < -1, -2 - token, token)


def finite(top: Array) -> Array:
    """Return a maximum that can be subtracted from logits without giving NaN: 0 where it is infinite.

    The maximum of no logits is -inf, and a row where one token takes all the mass may have inf.
    """
    return jnp.where(jnp.abs(top) < jnp.inf, top, 0)


def token_log_prob(logit: Array, top: Array, scale: Array, log_mass: Array) -> Array:
    """Return the log-probability of a token, given its logit and the normalizer of its row; -inf without mass."""
    log_prob = (logit - top) * scale - log_mass
    return jnp.where(log_mass > -jnp.inf, log_prob, -jnp.inf)


def exp(logits: Array, scale: Array, log_mass: Array | float = 0, *, flush: bool = False) -> Array:
    """Return exp(logits * scale - log_mass), computed with the hardware's power of two.

    With `flush`, results below 2**-126 become 0, which takes one instruction instead of four. An interpreted kernel
    cannot flush.
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
    """Return the first index at which the running sum of weights [N] exceeds `uniform` times their sum.

    It is never the index of a weight of 0, unless all are.
    """
    total = jnp.cumsum(weights)
    mass = jnp.max(total)
    bound = jnp.minimum(uniform * mass, jnp.nextafter(mass, jnp.float32(0)))
    index = jax.lax.iota(jnp.int32, weights.shape[0])
    last = jnp.max(jnp.where(weights > 0, index, 0))
    return jnp.min(jnp.where((weights > 0) & (total > bound), index, last))


def count_drafts(batch: Batch[Ref], sequence: Array) -> Array:
    """Count the drafts of a sequence inside a kernel: up to the first negative id, and at most its `num_tokens`."""
    assert batch.tokens is not None, "without drafts there is nothing to count"
    width = batch.num_drafts
    index = jax.lax.iota(jnp.int32, pl.next_power_of_2(width))
    ids = plgpu.load(batch.tokens.at[sequence, index], mask=index < width, other=-1)
    count = jnp.min(jnp.where(ids < 0, index, width))
    if batch.num_tokens is not None:
        count = jnp.maximum(jnp.minimum(count, plgpu.load(batch.num_tokens.at[sequence]).astype(jnp.int32)), 0)
    return count
