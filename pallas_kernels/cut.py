"""The cut of top-k, top-p and min-p on rows of logits, found in three launches without a sort.

1. Every program stores the maxima of the blocks of neighbouring tokens in its tile and, for top-p, the tile's mass.
2. One program a row gathers the blocks with the largest maxima and bisects the bit patterns of their logits. The cut
   that it finds is the cut of the row if it lies above all other blocks.
3. Where it does not, as with a very flat distribution, one program reads the whole row, trying several thresholds a
   read, until the logits that the cut may be one of fit in registers.

Rows that ask for nothing are not read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import Leaf, Ref, call, runtime_zero
from pallas_kernels.rows import exp, finite, inverse, unsupported_dtype
from pallas_kernels.triton import plgpu

LARGEST_VOCAB = 2**19  # tokens; the maxima of all blocks of a row are in registers at once
_NUM_LARGEST = 1024  # logits of a row that launch 2 searches
_CHUNK = 1024  # tokens in a load where weights are summed
_UNROLL = 4  # such loads in flight
_LINEAR = 7  # thresholds that a read tries, evenly between two logits; one more halves the range of bit patterns
_BRACKET = 4096  # logits that launch 3 searches in the end
_LISTED = 4096  # tokens in a load where these logits are listed
_UNUSED_BITS = {"float32": 0, "bfloat16": 16, "float16": 13}  # bits of a float32 that logits of the dtype leave 0
_SUBNORMAL = 0x7FFFFF  # largest bit pattern of a subnormal float32


class Limits(NamedTuple, Generic[Leaf]):
    """Limits of each row: arrays outside a kernel, references inside it, and scalars once a row is chosen."""

    temperature: Leaf | None  # [R], positive where anything is on; None is 1
    top_k: Leaf | None  # [R] int32, 0 where off
    top_p: Leaf | None  # [R], at least 1 where off
    min_p: Leaf | None  # [R], 0 or less where off

    def of(self: "Limits[Ref]", row: Array) -> "Limits[Array]":
        """Load the limits of one row."""
        return Limits(*(None if ref is None else plgpu.load(ref.at[row]) for ref in self))

    @property
    def is_restricted(self: "Limits[Array]") -> Array:
        """Whether min-p or top-k is on, so that top-p works on a part of the row."""
        if self.min_p is not None:
            return self.min_p > 0 if self.top_k is None else (self.top_k > 0) | (self.min_p > 0)
        if self.top_k is not None:
            return self.top_k > 0
        assert self.top_p is not None, "at least one limit must be given"
        return self.top_p > jnp.inf  # false for every row; a constant would not lower

    @property
    def is_asked(self: "Limits[Array]") -> Array:
        """Whether any limit is on."""
        return self.is_restricted if self.top_p is None else self.is_restricted | (self.top_p < 1)

    @property
    def scale(self: "Limits[Array]") -> Array:
        """1 / temperature, and 1 without temperatures."""
        return jnp.float32(1) if self.temperature is None else inverse(self.temperature)

    @property
    def min_distance(self: "Limits[Array]") -> Array:
        """The least distance of a kept logit from the best one under min-p, which must be given; a negative number."""
        assert self.min_p is not None
        log_min_p = jnp.log(self.min_p)
        return log_min_p if self.temperature is None else log_min_p * self.temperature


class _Blocks(NamedTuple, Generic[Leaf]):
    """Outputs of launch 1 for the M blocks of each row and for its N tiles, which hold some blocks each."""

    top: Leaf  # [R, M] largest logit
    tile_top: Leaf | None  # [R, N] largest logit, in rows where top-p works on the whole row
    tile_mass: Leaf | None  # [R, N] sum of exp((logit - tile_top) / temperature)

    def mass(self: "_Blocks[Ref]", row: Array, top: Array, scale: Array) -> Array:
        """Return the mass of a row relative to its largest logit, which is `top`."""
        assert self.tile_top is not None and self.tile_mass is not None, "the mass is stored for top-p alone"
        num_tiles = self.tile_top.shape[1]
        tile = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_tiles))
        tops = plgpu.load(self.tile_top.at[row, tile], mask=tile < num_tiles, other=-jnp.inf)
        masses = plgpu.load(self.tile_mass.at[row, tile], mask=tile < num_tiles, other=0)
        return jnp.sum(masses * exp(tops - top, scale))


class _Scratch(NamedTuple):
    """A list of at most C numbers for each row. Slot C takes the stores that are masked out."""

    values: Ref  # [R, C + 1]
    interpret: bool

    @property
    def capacity(self) -> int:
        return self.values.shape[1] - 1

    def append(self, row: Array, count: Array, values: Array, where: Array) -> Array:
        """Append the values where `where` is true to the first `count`; return how many there would be if all fit."""
        position = count + jax.lax.cumsum(where.astype(jnp.int32)) - 1
        fits = where & (position < self.capacity)
        # An interpreted kernel also stores masked elements: it writes the old values back, here to the spare slot.
        plgpu.store(self.values.at[row, jnp.where(fits, position, self.capacity)], values, mask=fits)
        return count + jnp.sum(where.astype(jnp.float32)).astype(jnp.int32)

    def load(self, row: Array, count: Array, index: Array, other: float) -> Array:
        """Load numbers that any thread appended; `other` for indices of `count` and more."""
        if not self.interpret:
            plgpu.debug_barrier()
        return plgpu.load(self.values.at[row, index], mask=index < count, other=other)

    def load_all(self, row: Array, count: Array) -> Array:
        """Load the whole list [C], -inf after the first `count` logits."""
        return self.load(row, count, jax.lax.iota(jnp.int32, self.capacity), -jnp.inf)


class _Found(NamedTuple, Generic[Leaf]):
    """Outputs of launch 2: its cuts, and its lists of candidates."""

    cut: Leaf  # [R]; NaN where the whole row must be searched
    blocks: Leaf  # [R, C + 1] int32 indices of blocks
    tokens: Leaf  # [R, N + 1] logits


def unsupported(logits: Array) -> str | None:
    """Return why the kernels cannot find the cut of logits [R, V] of this shape and dtype, or None where they can."""
    if logits.shape[-1] > LARGEST_VOCAB:
        return f"the kernels take at most {LARGEST_VOCAB} tokens, got {logits.shape[-1]}"
    return unsupported_dtype("logits", logits)


def find_cut(
    logits: Array,
    limits: Limits[Array],
    *,
    block_size: int = 64,
    num_candidates: int = 128,
    tile_size: int = 8192,
    num_warps: tuple[int, int, int] = (8, 8, 8),
    interpret: bool = False,
) -> Array:
    """Find the smallest logit of each row that its limits keep.

    Args:
        logits: [R, V] float32, bfloat16 or float16, V <= LARGEST_VOCAB. NaN counts as -inf.
        limits: of the R rows.
        block_size: tokens in a block, a power of two.
        num_candidates: blocks of a row that launch 2 gathers, a power of two.
        tile_size: tokens a program of launch 1 reads, a power of two.
        num_warps: warps of each program of the three launches.
        interpret: run the kernels interpreted, on any platform.

    Returns:
        [R] float32, -inf where no limit is on.
    """
    num_rows, vocab_size = logits.shape
    tile_size = max(block_size, min(tile_size, pl.next_power_of_2(vocab_size)))
    num_tiles = pl.cdiv(vocab_size, tile_size)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), jnp.float32)

    tiles = None if limits.top_p is None else floats(num_tiles)
    blocks = call(
        partial(_block_kernel, block_size=block_size, tile_size=tile_size),
        _Blocks(floats(num_tiles * (tile_size // block_size)), tiles, tiles),
        (logits, limits),
        grid=(num_rows, num_tiles),
        num_warps=num_warps[0],
        interpret=interpret,
    )
    found = call(
        partial(_candidate_kernel, block_size=block_size, interpret=interpret),
        _Found(floats(), jax.ShapeDtypeStruct((num_rows, num_candidates + 1), jnp.int32), floats(_NUM_LARGEST + 1)),
        (logits, limits, blocks),
        grid=(num_rows,),
        num_warps=num_warps[1],
        interpret=interpret,
    )
    cut, _ = call(
        partial(_row_kernel, interpret=interpret),
        (floats(), floats(_BRACKET + 1)),
        (logits, limits, blocks, found.cut),
        grid=(num_rows,),
        num_warps=num_warps[2],
        interpret=interpret,
    )
    return cut


def _load(logits: Ref, row: Array, ids: Array, where: Array | bool = True) -> Array:
    """Load logits of a row in float32, NaN as -inf."""
    x = plgpu.load(logits.at[row, ids], mask=(ids < logits.shape[1]) & where, other=-jnp.inf).astype(jnp.float32)
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


def _key(value: Array, dtype: jnp.dtype) -> Array:
    """Map a number of `dtype` to an integer so that order is kept and neighbours stay neighbours.

    Subnormal numbers count as 0.
    """
    unused = _UNUSED_BITS[dtype.name]
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    size = jnp.maximum(((bits & 0x7FFFFFFF) >> unused) - (_SUBNORMAL >> unused), 0)
    return jnp.where(bits < 0, -size, size)


def _value(key: Array, dtype: jnp.dtype) -> Array:
    """Return the number that `_key` maps to `key`."""
    unused = _UNUSED_BITS[dtype.name]
    size = jnp.abs(key)
    size = jnp.where(size > 0, size + (_SUBNORMAL >> unused), size)
    value = jax.lax.bitcast_convert_type(size << unused, jnp.float32)
    return jnp.where(key < 0, -value, value)


def _middle(low: Array, high: Array) -> Array:
    """Return (low + high) / 2, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


def _bisect(
    x: Array, weights: Array | None, low: Array, high: Array, target: Array, dtype: jnp.dtype, above: Array | float = 0
) -> Array:
    """Find the largest logit in (low, high] such that the weights from it up sum to `target`; `low` if there is none.

    Args:
        x: logits, among them those in (low, high].
        weights: of x; None is 1 each.
        low: a logit.
        high: a logit.
        target: the sum to reach.
        dtype: of the logits before they were widened.
        above: weight of logits above `high` that are not in x.
    """

    def narrow(state):
        low, high, num_from_low, num_above = state
        middle = _middle(low, high)
        is_above = x >= _value(middle, dtype)
        count = jnp.sum(is_above.astype(jnp.float32))
        total = count if weights is None else above + jnp.sum(jnp.where(is_above, weights, 0))
        reached = total >= target
        return (
            jnp.where(reached, middle, low),
            jnp.where(reached, high, middle - 1),
            jnp.where(reached, count, num_from_low),
            jnp.where(reached, num_above, count),
        )

    def is_open(state):
        low, high, num_from_low, num_above = state
        return (low < high) & (num_from_low - num_above > 1)

    zero = jnp.zeros_like(target)
    state = _key(low, dtype), _key(high, dtype), zero + jnp.inf, zero
    low, high, *_ = jax.lax.while_loop(is_open, narrow, state)
    low_value = _value(low, dtype)
    only = jnp.min(jnp.where(x >= low_value, x, jnp.inf))
    return jnp.where(low < high, only, low_value)


def _block_kernel(inputs, out: _Blocks[Ref], *, block_size: int, tile_size: int):
    logits, limits = inputs
    row, tile = pl.program_id(0), pl.program_id(1)
    limits = limits.of(row)

    @pl.when(limits.is_asked)
    def _():
        x = _load(logits, row, tile * tile_size + jax.lax.iota(jnp.int32, tile_size))
        num_blocks = tile_size // block_size
        tops = jnp.max(x.reshape(num_blocks, block_size), axis=1)
        plgpu.store(out.top.at[row, tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)], tops)
        tile_top, tile_mass = out.tile_top, out.tile_mass
        if tile_top is None or tile_mass is None:
            return

        @pl.when(~limits.is_restricted)
        def _():
            top = jnp.max(tops)
            plgpu.store(tile_top.at[row, tile], top)
            plgpu.store(tile_mass.at[row, tile], jnp.sum(exp(x - finite(top), limits.scale)))


def _load_tops(blocks: _Blocks[Ref], row: Array) -> Array:
    """Load the maxima of all blocks of a row, -inf past the last block."""
    num_blocks = blocks.top.shape[1]
    block = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_blocks))
    return plgpu.load(blocks.top.at[row, block], mask=block < num_blocks, other=-jnp.inf)


def _candidate_kernel(inputs, out: _Found[Ref], *, block_size: int, interpret: bool):
    logits, limits, blocks = inputs
    row = pl.program_id(0)
    limits, dtype = limits.of(row), logits.dtype

    @pl.when(~limits.is_asked)
    def _():
        plgpu.store(out.cut.at[row], jnp.float32(-jnp.inf))

    @pl.when(limits.is_asked)
    def _():
        tops = _load_tops(blocks, row)
        top = jnp.max(tops)
        chosen_blocks, chosen = _Scratch(out.blocks, interpret), _Scratch(out.tokens, interpret)
        least = jnp.float32(chosen_blocks.capacity * 3 // 4)
        if limits.top_k is not None:  # the best top_k tokens lie in the top_k blocks with the largest maxima
            least = jnp.maximum(least, jnp.minimum(limits.top_k.astype(jnp.float32), chosen_blocks.capacity))
        index = jax.lax.iota(jnp.int32, tops.shape[0])
        count, floor, outside = _append_largest(chosen_blocks, row, tops, index, _lowest(tops), least, dtype)

        lane = jax.lax.iota(jnp.int32, chosen_blocks.capacity * block_size)
        block = chosen_blocks.load(row, count, lane // block_size, -1)
        x = _load(logits, row, block * block_size + lane % block_size, block >= 0)
        floor = jnp.where(outside > -jnp.inf, floor, _lowest(x))
        least = jnp.float32(chosen.capacity * 3 // 4)
        count, _, rest = _append_largest(chosen, row, x, x, floor, least, dtype)
        rest = jnp.maximum(rest, outside)

        def row_mass() -> Array:
            return blocks.mass(row, top, limits.scale)

        cut, decisive = _search_candidates(chosen.load_all(row, count), rest, top, limits, dtype, row_mass)
        is_found = (decisive > rest) | (rest == -jnp.inf)
        plgpu.store(out.cut.at[row], jnp.where(is_found, cut, jnp.nan))


def _lowest(x: Array) -> Array:
    """Return the smallest logit above -inf, and -inf if there is none."""
    return jnp.min(jnp.where(x > -jnp.inf, x, jnp.max(x)))


def _append_largest(
    scratch: _Scratch, row: Array, x: Array, values: Array, floor: Array, least: Array, dtype: jnp.dtype
) -> tuple[Array, Array, Array]:
    """Append the values of all x >= floor to a list.

    If they are too many for the list, the floor is raised, while at least `least` of them stay; where more equal x than
    fit lie at that floor, it is raised above them.

    Returns:
        The number of values in the list, the raised floor, and the largest x below it.
    """
    top = jnp.max(x)

    def count(threshold: Array) -> Array:
        return jnp.sum((x >= threshold).astype(jnp.float32))

    def narrow(state):
        low, high, num_from_low = state
        middle = _middle(low, high)
        num_from_middle = count(_value(middle, dtype))
        is_enough = num_from_middle >= least
        return (
            jnp.where(is_enough, middle, low),
            jnp.where(is_enough, high, middle - 1),
            jnp.where(is_enough, num_from_middle, num_from_low),
        )

    def is_open(state):
        low, high, num_from_low = state
        return (num_from_low > scratch.capacity) & (low < high)

    state = _key(floor, dtype), _key(top, dtype), count(floor)
    low, _, num_from_low = jax.lax.while_loop(is_open, narrow, state)
    floor = _value(low + (num_from_low > scratch.capacity).astype(jnp.int32), dtype)
    is_chosen = x >= floor
    return scratch.append(row, runtime_zero(low), values, is_chosen), floor, jnp.max(jnp.where(is_chosen, -jnp.inf, x))


def _search_candidates(
    x: Array, rest: Array, top: Array, limits: Limits[Array], dtype, row_mass
) -> tuple[Array, Array]:
    """Find the cut of a row from its largest logits.

    Args:
        x: the largest logits of the row.
        rest: no logit of the row that is not in x is larger.
        top: the largest logit.
        limits: of the row.
        dtype: of the logits before they were widened.
        row_mass: function that gives the mass of the whole row.

    Returns:
        A cut, and a logit: the cut holds for the whole row if this logit lies above `rest`.
    """
    cut = rest
    if limits.min_p is not None:
        kept = jnp.min(jnp.where(x - top >= limits.min_distance, x, jnp.inf))
        kept = jnp.where(rest - top >= limits.min_distance, rest, jnp.minimum(kept, top))
        cut = jnp.where(limits.min_p > 0, kept, cut)
    if limits.top_k is not None:
        top_k = limits.top_k.astype(jnp.float32)
        cut = _bisect(x, None, cut, jnp.where(top_k > 0, top, cut), top_k, dtype)
    decisive = cut
    if limits.top_p is not None:
        weights = exp(x - finite(top), limits.scale)

        mass = jax.lax.cond(limits.is_restricted, lambda: jnp.sum(jnp.where(x >= cut, weights, 0)), row_mass)
        cut = _bisect(x, weights, cut, jnp.where(limits.top_p < 1, top, cut), limits.top_p * mass, dtype)
        decisive = jnp.where(limits.is_restricted, decisive, cut)
    return cut, decisive


def _row_kernel(inputs, out, *, interpret: bool):
    logits, limits, blocks, found = inputs
    row = pl.program_id(0)
    cut = plgpu.load(found.at[row])
    out_cut, scratch = out
    find = partial(_search_row, logits, row, limits, blocks, _Scratch(scratch, interpret))
    plgpu.store(out_cut.at[row], jax.lax.cond(jnp.isnan(cut), find, lambda: cut))


def _search_row(logits: Ref, row: Array, asked: Limits[Ref], blocks: _Blocks[Ref], scratch: _Scratch) -> Array:
    """Find the cut of a row by reading all of it."""
    limits = asked.of(row)
    tops = _load_tops(blocks, row)
    top = jnp.max(tops)
    cut = jnp.minimum(top, -jnp.inf)  # -inf; a constant would not lower

    def raise_cut(cut: Array, is_on: Array, weigh: Callable[[Array], Array], target: Array, hint: Array) -> Array:
        high = jnp.where(is_on, top, cut)
        return _search_between(logits, row, cut, high, weigh, target, hint, scratch)

    if limits.min_p is not None:

        def keep(x: Array, least: Array) -> Array:
            return jnp.minimum(least, jnp.where(x - top >= limits.min_distance, x, jnp.inf))

        kept = jnp.min(_over_row(logits, row, keep, jnp.full(_CHUNK, jnp.inf, jnp.float32)))
        cut = jnp.where(limits.min_p > 0, jnp.minimum(kept, top), cut)
    if limits.top_k is not None:
        target = limits.top_k.astype(jnp.float32)
        # At least as many tokens as there are blocks reach the smallest maximum of a block.
        hint = jnp.min(jnp.where(tops > -jnp.inf, tops, top))
        cut = raise_cut(cut, target > 0, jnp.ones_like, target, hint)
    if limits.top_p is not None:

        def weigh(x: Array) -> Array:
            return exp(x - top, limits.scale)

        mass = jax.lax.cond(
            limits.is_restricted,
            lambda: _sums(logits, row, [cut], weigh)[0],
            lambda: blocks.mass(row, top, limits.scale),
        )
        # All tokens below this logit together hold less than 1 - top_p of the mass.
        hint = top + jnp.log((1 - limits.top_p) * mass / logits.shape[1]) / limits.scale
        cut = raise_cut(cut, limits.top_p < 1, weigh, limits.top_p * mass, hint)
    return cut


def _search_between(
    logits: Ref,
    row: Array,
    low: Array,
    high: Array,
    weigh: Callable[[Array], Array],
    target: Array,
    hint: Array,
    scratch: _Scratch,
) -> Array:
    """Find the largest logit in (low, high] such that the weights from it up sum to `target`; `low` if there is none.

    Args:
        logits: reference to [R, V].
        row: index of the row.
        low: a logit.
        high: a logit.
        weigh: function of logits to their weights.
        target: the sum to reach.
        hint: the smallest threshold to try, where it lies below `high`.
        scratch: list for the logits that the result is one of.
    """
    dtype = logits.dtype

    def is_wide(state):
        low, high, from_low, above = state
        # Each logit in between weighs at least as much as `low`. More of them than fit in the list may be left only
        # where rounding hides their weight.
        return (low < high) & ~(from_low - above <= scratch.capacity * weigh(_value(low, dtype)))

    def narrow(state):
        low, high, from_low, above = state
        last = _value(high, dtype)
        first = jnp.maximum(_value(low, dtype), jnp.finfo(jnp.float32).min)
        first = jnp.where(hint < last, jnp.maximum(first, hint), first)
        values = [first * (1 - i / _LINEAR) + last * (i / _LINEAR) for i in range(_LINEAR)]
        keys = [jnp.maximum(jnp.minimum(_key(value, dtype), high), low) for value in values] + [_middle(low, high)]
        for key, total in zip(keys, _sums(logits, row, [_value(key, dtype) for key in keys], weigh), strict=True):
            reached = total >= target
            low = jnp.where(reached, jnp.maximum(low, key), low)
            high = jnp.where(reached, high, jnp.minimum(high, key - 1))
            from_low = jnp.where(reached, jnp.minimum(from_low, total), from_low)
            above = jnp.where(reached, above, jnp.maximum(above, total))
        return low, high, from_low, above

    zero = jnp.zeros_like(target)
    state = _key(low, dtype), _key(high, dtype), zero + jnp.inf, zero
    low_key, high_key, _, above = jax.lax.while_loop(is_wide, narrow, state)
    low, high = _value(low_key, dtype), _value(high_key, dtype)

    def search_list() -> Array:
        def append(x: Array, count: Array) -> Array:
            return scratch.append(row, count, x, (x >= low) & (x <= high))

        count = _over_row(logits, row, append, runtime_zero(low_key), size=_LISTED, unroll=1)
        x = scratch.load_all(row, count)
        return _bisect(x, weigh(x), low, high, target, dtype, above)

    return jax.lax.cond(low_key < high_key, search_list, lambda: low)


def _sums(logits: Ref, row: Array, thresholds: list[Array], weigh: Callable[[Array], Array]) -> list[Array]:
    """Sum the weights of a row from each threshold up."""

    def add(x: Array, sums: list[Array]) -> list[Array]:
        weights = weigh(x)
        return [total + jnp.where(x >= least, weights, 0) for total, least in zip(sums, thresholds, strict=True)]

    zeros = [jnp.zeros(_CHUNK, jnp.float32)] * len(thresholds)
    return [jnp.sum(total) for total in _over_row(logits, row, add, zeros)]


def _over_row(
    logits: Ref, row: Array, step: Callable[[Array, Any], Any], carry: Any, size: int = _CHUNK, unroll: int = _UNROLL
) -> Any:
    """Fold `step(x [size], carry)` over a row, with `unroll` loads in flight."""
    lane = jax.lax.iota(jnp.int32, size)

    def body(i, carry):
        chunks = [_load(logits, row, (i * unroll + j) * size + lane) for j in range(unroll)]
        for x in chunks:
            carry = step(x, carry)
        return carry

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(logits.shape[1], size * unroll)), body, carry)
