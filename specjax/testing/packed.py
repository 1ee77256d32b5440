"""Packed calls, one beside a step, and ragged steps, for the check of a model that says that it takes them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.operations.groups import join
from specjax.types import Model, ModelInput, ModelOutput, PyTree

TILE, NUM_TILES = 2, 6
# Pieces (row, first position, count) of two calls: they end in and at a tile, and go on where others of a row ended.
CALLS = ([(2, 0, 3), (0, 0, 4)], [(0, 4, 5), (1, 0, 1), (2, 3, 4)], [(2, 7, 3), (0, 9, 2)])
STEP = (1, 1, 2)  # tokens of a row in another group of the last call
RAGGED, RAGGED_SIZE = (4, (3, 1, 4)), 9  # the first tokens of all rows, then so many of each; the size leaves one place


def logits_of_pieces(
    model: Model,
    call: Callable[[Model, ModelInput, PyTree], tuple[ModelOutput, PyTree]],
    tokens: np.ndarray,
    pages: np.ndarray,
    cache: PyTree,
):
    """Yield the row, the first position and the logits [1, count, V] of each piece of packed calls, and of a step.

    Args:
        model: the model.
        call: runs `model.apply`.
        tokens: [B, N] int32, the tokens of B >= 3 rows.
        pages: [B, P] int32, their pages.
        cache: a pool, which does not change.
    """
    num_rows, no_page = len(tokens), jax.tree.leaves(cache)[0].shape[0]
    for pieces in CALLS:
        fed, positions = np.zeros((2, 1, TILE * NUM_TILES), np.int32)
        places = np.tile(np.array([num_rows, 0, 0], np.int32), (NUM_TILES, 1))
        table, begin = np.full((NUM_TILES, pages.shape[1]), no_page, np.int32), 0
        for i, (row, first, count) in enumerate(pieces):
            end = begin + -(-count // TILE) * TILE
            fed[0, begin : begin + count] = tokens[row, first : first + count]
            positions[0, begin:end] = np.arange(first, first + end - begin)
            places[i], table[i], begin = (row, begin, count), pages[row], end
        fed, positions, table, given = map(jnp.asarray, (fed, positions, table, places))
        inputs, offset = ModelInput(fed, positions, pages=table, pieces=given), 0
        if pieces is CALLS[-1]:
            row, first, offset = STEP
            place = np.arange(first, first + offset)[None]
            fed, place, table = map(jnp.asarray, (tokens[row : row + 1, place[0]], place, pages[row : row + 1]))
            step = ModelInput(fed, place, pages=table)
            inputs = join([step, inputs])
        output, cache = call(model, inputs, cache)
        if offset:
            yield row, first, np.asarray(output.logits, np.float64)[:, :offset]
        for (row, first, count), (_, begin, _) in zip(pieces, places, strict=False):
            yield row, first, np.asarray(output.logits, np.float64)[:, offset + begin : offset + begin + count]


def logits_of_ragged_step(
    model: Model,
    call: Callable[[Model, ModelInput, PyTree], tuple[ModelOutput, PyTree]],
    tokens: np.ndarray,
    pages: np.ndarray,
    cache: PyTree,
):
    """Yield the row, the first position and the logits [1, count, V] of each row of a ragged step after a plain one.

    `logits_of_pieces` describes the arguments; there are three rows or more.
    """
    first, counts = RAGGED
    num_rows = len(counts)
    for start, width, num_tokens in ((0, first, None), (first, max(counts), counts)):
        positions = np.tile(np.arange(start, start + width, dtype=np.int32), (num_rows, 1))
        table = jnp.asarray(pages[:num_rows])
        step = ModelInput(jnp.asarray(tokens[:num_rows, start : start + width]), jnp.asarray(positions), pages=table)
        if num_tokens is not None:
            step = join([step._replace(num_tokens=jnp.array(num_tokens, jnp.int32))], RAGGED_SIZE)
        output, cache = call(model, step, cache)
    logits, begin = np.asarray(output.logits, np.float64), 0
    for row, count in enumerate(counts):
        yield row, first, logits[:, begin : begin + count]
        begin += count
