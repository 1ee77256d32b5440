"""Packed calls: pieces of several sequences side by side in one row of tokens.

`ModelInput.pieces` describes such a call. Its C tokens are S *tiles* of C / S tokens. A piece begins with a tile and
may fill several, so no tile holds tokens of two sequences. To attention a tile is a row of a call: its tokens stand in
consecutive slots, and the tokens of earlier tiles are in the cache by then. These functions leave calls that are not
packed as they are.
"""

import jax
import jax.numpy as jnp

from specjax.types import NO_PAGE, Array, ModelInput, PyTree
from specjax.validation import check_array

TOKENS = 1  # axis of the tokens of a call


def check_pieces(inputs: ModelInput, takes_groups: bool) -> None:
    """Raise ValueError for a packed call of other shapes than `ModelInput` says, or for a model that takes none."""
    if inputs.pieces is None:
        return
    if not takes_groups:
        raise ValueError(
            f"inputs.pieces must be None for a model whose takes_groups is False, got pieces {inputs.pieces.shape}"
        )
    check_array("inputs.pieces", inputs.pieces, "[S, 3]", (None, 3), jnp.integer)
    num_rows, num_tokens = inputs.tokens.shape
    num_pieces = inputs.pieces.shape[0]
    if num_rows != 1 or not num_pieces or num_tokens % num_pieces:
        raise ValueError(
            f"inputs.tokens of a packed call must have shape [1, C], with C a multiple of the S = {num_pieces} pieces, "
            f"got {inputs.tokens.shape}"
        )
    given = [name for name in ("mask", "num_tokens", "rows") if getattr(inputs, name) is not None]
    if given:
        raise ValueError(f"inputs.{given[0]} must be None in a packed call, which has pieces, got an array")


def by_tile(inputs: ModelInput) -> ModelInput:
    """Return a packed call as a call with a row for each tile, [S, C / S]; `num_tokens` leaves padding out.

    Tiles without a piece are of no row and have no pages. Several rows may be of one sequence, in order.
    """
    if inputs.pieces is None:
        return inputs
    row, start, count = jnp.unstack(inputs.pieces, axis=1)
    num_tiles = row.shape[0]
    tokens, positions = (x.reshape(num_tiles, -1) for x in (inputs.tokens, inputs.positions))
    size = tokens.shape[1]
    first = size * jnp.arange(num_tiles, dtype=jnp.int32)
    is_inside = (start[None] <= first[:, None]) & (first[:, None] < (start + count)[None])  # [tiles, pieces]
    piece = jnp.where(jnp.any(is_inside, axis=1), jnp.argmax(is_inside, axis=1), num_tiles)
    pages = row[:, None] if inputs.pages is None else inputs.pages  # of a dense cache, row b owns page b
    end = (start + count).at[piece].get(mode="fill", fill_value=0)
    return ModelInput(
        tokens,
        positions,
        pages=pages.at[piece].get(mode="fill", fill_value=NO_PAGE),
        num_tokens=jnp.clip(end - first, 0, size),
        rows=row.at[piece].get(mode="fill", fill_value=NO_PAGE),
    )


def in_tiles(tiles: ModelInput, values: PyTree) -> PyTree:
    """Return values [1, C, ...] of the tokens of a packed call as [S, C / S, ...], given the result of `by_tile`."""
    return jax.tree.map(lambda x: x.reshape(*tiles.tokens.shape, *x.shape[2:]), values)


def at_token(inputs: ModelInput, values: Array, index: Array) -> Array:
    """Return the value of token `index` [R] of each row, or of each piece of a packed call, as [R, ...].

    Args:
        inputs: the call.
        values: of its tokens, [R, T, ...], or [1, C, ...] of a packed call.
        index: [R] int32 in the row or the piece, at least 0.
    """
    if inputs.pieces is None:
        return values[jnp.arange(index.shape[0]), index]
    return values[0].at[inputs.pieces[:, 1] + index].get(mode="clip")


def after(inputs: ModelInput, previous: PyTree, values: PyTree) -> PyTree:
    """Return the value of the token before each token of a call.

    Args:
        inputs: the call.
        previous: of the token before each row or piece, [R, ...].
        values: of the tokens of the call, [R, T, ...], or [1, C, ...] of a packed call.
    """
    if inputs.pieces is None:
        return jax.tree.map(lambda first, x: jnp.concatenate([first[:, None], x[:, :-1]], axis=1), previous, values)
    _, start, count = jnp.unstack(inputs.pieces, axis=1)
    start = jnp.where(count > 0, start, inputs.tokens.shape[TOKENS])  # past the end, for a place without a piece

    def shift(first: Array, x: Array) -> Array:
        moved = jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
        return moved.at[0, start].set(first.astype(x.dtype), mode="drop")

    return jax.tree.map(shift, previous, values)
