"""The choice of experts for a few rows, and the tiles of their products, in one launch of one program.

The choice of few rows is little arithmetic. By itself each of its reductions would be a launch, which takes longer than
the reduction.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.experts import Tiles
from pallas_kernels.launch import call
from pallas_kernels.triton import plgpu

MAX_ROWS, MAX_PAIRS = 16, 128
MAX_EXPERTS, MAX_COMPARED = 64, 1 << 14  # of more, one program takes longer to compare them than several launches take
Rule = Callable[[Mapping[str, Array], Array], tuple[Array, Array]]


def unsupported(logits: Array, num_chosen: int) -> str | None:
    """Return why the kernel cannot choose by logits [T, E], or None where it can."""
    num_rows, num_experts = logits.shape
    for name, size in (("experts", num_experts), ("chosen experts", num_chosen)):
        if size & (size - 1):
            return f"the kernel takes a power of two of {name}, got {size}"
    if num_rows > MAX_ROWS or _padded(num_rows) * num_chosen > MAX_PAIRS:
        return f"the kernel takes at most {MAX_ROWS} rows and {MAX_PAIRS} pairs, got {num_rows} rows of {num_chosen}"
    if num_experts > MAX_EXPERTS:
        return f"the kernel takes at most {MAX_EXPERTS} experts, got {num_experts}"
    if _padded(num_rows) * num_experts**2 > MAX_COMPARED:
        return f"the kernel makes at most {MAX_COMPARED} comparisons, got {num_rows} rows of {num_experts} experts"
    return None


def choose(
    logits: Array,
    params: Mapping[str, Array],
    rule: Rule,
    num_chosen: int,
    *,
    num_tiles: int,
    size: int,
    interpret: bool = False,
) -> tuple[Array, Array, Tiles]:
    """Choose experts, and cut the pairs of a row and an expert into tiles.

    Args:
        logits: [T, E] float32.
        params: vectors [E], which the rule reads.
        rule: function of the vectors and of logits [R, E] that returns experts [R, k] int32 and weights [R, k] float32.
            It consists of operations by element, of broadcasts and of reductions. It can be hashed.
        num_chosen: k.
        num_tiles: tiles that any choice needs.
        size: most places of a tile, a power of two.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The experts [T, k] int32, their weights [T, k] float32, and the tiles.
    """
    num_rows = logits.shape[0]
    num_pairs, shape = num_rows * num_chosen, jax.ShapeDtypeStruct
    pairs, tiles = shape((num_pairs,), jnp.int32), shape((num_tiles,), jnp.int32)
    chosen = shape((num_rows, num_chosen), jnp.int32), shape((num_rows, num_chosen), jnp.float32)
    return call(
        partial(_choice_kernel, rule=rule),
        (*chosen, Tiles(pairs, pairs, tiles, tiles, tiles, size)),
        (logits, dict(params)),
        grid=(1,),
        num_warps=4 if _padded(num_rows) * logits.shape[1] ** 2 <= 1 << 13 else 8,
        interpret=interpret,
    )


def tiles_of_pairs(experts: Array, is_pair: Array, num_experts: int, num_tiles: int, size: int) -> Tiles:
    """Return the tiles of pairs by comparing each pair with each, and each expert with each.

    Args:
        experts: [P] int32, the expert of each pair, and `num_experts` in places without a pair.
        is_pair: [P] bool.
        num_experts: E.
        num_tiles: tiles that any choice needs.
        size: most places of a tile.

    Returns:
        The tiles, in whose `row` stands the pair of each place.
    """
    pair, expert = _numbers(experts.shape[0]), _numbers(num_experts)
    is_equal = experts[None] == experts[:, None]
    place = _count((experts[None] < experts[:, None]) | (is_equal & (pair[None] < pair[:, None])))
    order = _sum(jnp.where(place[None] == pair[:, None], pair[None], 0))
    counts = _count(experts[None] == expert[:, None])
    last = jnp.max(jnp.where(is_pair, experts, 0))
    return cut(order, place, counts, last, num_tiles, size)


def cut(order: Array, place: Array, counts: Array, last: Array, num_tiles: int, size: int) -> Tiles:
    """Return the tiles of sorted pairs.

    Args:
        order: [P] int32, the pair of each place.
        place: [P] int32, the place of each pair.
        counts: [E] int32, the pairs of each expert.
        last: [] int32, the last expert that has pairs.
        num_tiles, size: as `tiles_of_pairs` takes them.
    """
    expert, index = _numbers(counts.shape[0]), _numbers(num_tiles)
    own_tiles = jax.lax.div(counts + (size - 1), jnp.full_like(counts, size))
    is_earlier = expert[None] < expert[:, None]
    first = _sum(jnp.where(is_earlier, counts[None], 0))
    first_tile = _sum(jnp.where(is_earlier, own_tiles[None], 0))
    own = jnp.minimum(_count((first_tile + own_tiles)[None] <= index[:, None]), last)
    is_own = expert[None] == own[:, None]

    def of_own(x: Array) -> Array:
        return _sum(jnp.where(is_own, x[None], 0))

    within = (index - of_own(first_tile)) * size
    count = jnp.clip(of_own(counts) - within, 0, size)
    return Tiles(order, place, jnp.where(count > 0, of_own(first) + within, 0), count, own, size)


def _choice_kernel(inputs, outputs, *, rule: Rule):
    logits_ref, params = inputs
    experts_ref, weights_ref, tiles = outputs
    (num_rows, num_experts), num_chosen = logits_ref.shape, experts_ref.shape[1]
    row, expert = _numbers(_padded(num_rows))[:, None], _numbers(num_experts)
    exists = row < num_rows
    logits = plgpu.load(logits_ref.at[row, expert[None]], mask=exists, other=0.0)
    experts, weights = rule({name: plgpu.load(ref.at[expert]) for name, ref in params.items()}, logits)
    number = _numbers(num_chosen)[None]
    plgpu.store(experts_ref.at[row, number], experts, mask=exists)
    plgpu.store(weights_ref.at[row, number], weights, mask=exists)
    is_pair = jnp.broadcast_to(exists, experts.shape).reshape(-1)
    flat = jnp.where(exists, experts, num_experts).reshape(-1)
    found = tiles_of_pairs(flat, is_pair, num_experts, _padded(tiles.start.shape[0]), tiles.num_rows)
    found = replace(found, row=jax.lax.div(found.row, jnp.full_like(found.row, num_chosen)))
    for name in ("row", "place", "start", "count", "expert"):
        ref, values = getattr(tiles, name), getattr(found, name)
        index = _numbers(values.shape[0])
        plgpu.store(ref.at[index], values, mask=index < ref.shape[0])


def _padded(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _numbers(size: int) -> Array:
    return jax.lax.iota(jnp.int32, size)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=1, dtype=jnp.int32)


def _count(is_counted: Array) -> Array:
    return _sum(is_counted.astype(jnp.int32))
