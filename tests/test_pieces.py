"""Packed calls: the rows that attention reads, the tokens before and at a place, and calls that are refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.decoding.calls import run
from specjax.operations.groups import join, split
from specjax.operations.pieces import after, at_token, by_tile
from specjax.types import NO_PAGE, ModelInput

# Tiles of two tokens: three tokens of row 4, none, one of row 1.
PIECES = np.array([[4, 0, 3], [9, 0, 0], [1, 4, 1], [9, 0, 0]], np.int32)
TOKENS = np.array([[10, 11, 12, 0, 20, 0, 0, 0]], np.int32)
POSITIONS = np.array([[5, 6, 7, 8, 0, 1, 0, 0]], np.int32)
CALL = ModelInput(TOKENS, POSITIONS, pages=np.array([[3], [9], [7], [9]], np.int32), pieces=PIECES)


@pytest.fixture
def call():
    return jax.tree.map(jnp.asarray, CALL)


def test_tiles(call):
    tiles = by_tile(call)
    assert tiles.tokens.tolist() == [[10, 11], [12, 0], [20, 0], [0, 0]]
    assert tiles.positions[:, 0].tolist() == [5, 7, 0, 0]
    assert tiles.rows.tolist() == [4, 4, 1, NO_PAGE] and tiles.pages[:, 0].tolist() == [3, 3, 7, NO_PAGE]
    assert tiles.num_tokens.tolist() == [2, 1, 1, 0]
    assert by_tile(call._replace(pages=None)).pages[:, 0].tolist() == [4, 4, 1, NO_PAGE]  # of a dense cache
    assert by_tile(tiles) is tiles


def test_values_of_pieces(call):
    assert call.counts.tolist() == [3, 0, 1, 0] and call.sequences.tolist() == [4, 9, 1, 9]
    assert call.starts[jnp.array([0, 2])].tolist() == [5, 0]
    values = jnp.asarray(TOKENS)[..., None]
    assert at_token(call, values, jnp.array([2, 0, 0, 0]))[:, 0].tolist() == [12, 10, 20, 10]
    found = after(call, jnp.array([[1], [2], [3], [4]]), values)[0, :, 0]
    assert found[jnp.array([0, 1, 2, 4])].tolist() == [1, 10, 11, 3]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "inputs.pieces must be None for a model whose takes_groups is False"),
        ({"pieces": PIECES[:, :2]}, r"inputs.pieces must have shape \[S, 3\]"),
        ({"pieces": PIECES[:3]}, r"must have shape \[1, C\], with C a multiple of the S = 3 pieces, got \(1, 8\)"),
        ({"rows": np.zeros(1, np.int32)}, "inputs.rows must be None in a packed call, which has pieces, got an array"),
        ({"pages": CALL.pages[:1]}, r"inputs.pages must have shape \[R, P\] = \(4, any\)"),
    ],
)
def test_bad_calls_are_refused(changes, message):
    model = replace(testing.bigram_model(jnp.zeros((32, 32))), takes_groups=bool(changes))
    with pytest.raises(ValueError, match=message):
        run(model, CALL._replace(**changes), model.init_memory(10, 10, 8))


STEP = ModelInput(np.ones((2, 3), np.int32), np.zeros((2, 3), np.int32))


def test_groups_are_one_row_of_tokens(call):
    both = join([STEP, call])
    assert both.tokens.shape == both.positions.shape == (1, 14)
    assert [part.tolist() for part in split(both, both.tokens)] == [[[1] * 6], TOKENS.tolist()]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "inputs.groups must be None for a model whose takes_groups is False, got 2 groups"),
        ({"tokens": STEP.tokens}, r"tokens of a call with groups must have shape \[1, N\] = \(1, 14\), got \(2, 3\)"),
        ({"pieces": PIECES}, "inputs.pieces must be None in a call with groups"),
        ({"groups": (STEP, CALL._replace(pieces=PIECES[:3]), STEP._replace(tokens=STEP.tokens[:0]))}, "S = 3 pieces"),
    ],
)
def test_bad_groups_are_refused(call, changes, message):
    model = replace(testing.bigram_model(jnp.zeros((32, 32))), takes_groups=bool(changes))
    with pytest.raises(ValueError, match=message):
        run(model, join([STEP, call])._replace(**changes), model.init_memory(10, 10, 8))
