"""Sort the pairs of a row and its experts by expert, and cut them into tiles that each have one expert."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.experts import Tiles
from specjax.types import Array

MAX_COMPARED = 1024  # pairs of a row and an expert that are sorted by comparing each with each


def tiles_of(experts: Array, num_experts: int, smallest: int, largest: int) -> Tiles:
    """Return the tiles of the experts [T, k] of T rows, as many as any choice needs."""
    num_rows, num_chosen = experts.shape
    num_pairs = num_rows * num_chosen
    num_tiles, size = sizes_of_tiles(num_rows, num_chosen, num_experts, smallest, largest)
    flat, pair = experts.reshape(-1), jax.lax.iota(jnp.int32, num_pairs)
    if share_no_tiles(num_rows, num_chosen, num_experts):
        return Tiles(pair // num_chosen, pair, pair, jnp.ones_like(pair), flat, size)
    if isinstance(num_pairs, int) and num_pairs <= MAX_COMPARED:  # on GPUs a few comparisons take less time than a sort
        tiles = choice.tiles_of_pairs(flat, jnp.ones_like(flat, bool), num_experts, num_tiles, size)
    else:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(pair).at[order].set(pair, unique_indices=True)
        counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
        tiles = choice.cut(order, place, counts, flat[order[-1]], num_tiles, size)
    return replace(tiles, row=tiles.row // num_chosen)


def sizes_of_tiles(num_rows: int, num_chosen: int, num_experts: int, smallest: int, largest: int) -> tuple[int, int]:
    """Return the number of tiles that any choice needs, and the most rows of one.

    A tile has about as many rows as an expert has on average, a power of two from `smallest` to `largest`. Tiles have
    the smallest size where the number of rows is symbolic, as in exported functions: it cannot be compared with others.
    """
    num_pairs = num_rows * num_chosen
    if not isinstance(num_rows, int):
        return num_experts + num_pairs // smallest, smallest
    average = 1 << (max(1, num_pairs // num_experts) - 1).bit_length()
    size = max(smallest, min(largest, average))
    if share_no_tiles(num_rows, num_chosen, num_experts):
        return num_pairs, size
    return min(num_pairs, min(num_experts, num_pairs) + num_pairs // size), size


def share_no_tiles(num_rows: int, num_chosen: int, num_experts: int) -> bool:
    """Return whether each pair of a row and one of its experts gets its tile, because few pairs share an expert."""
    if not isinstance(num_rows, int):
        return False
    return 4 * num_rows * num_chosen <= num_experts or num_rows == 1
