"""Hybrids, whose recurrent layers keep a state that no rejected draft enters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import GOLDENS
from hybrids import CONFIGS, NUM_TOKENS, tokens, write

from specjax.models import load
from specjax.models.delta_net import delta_rule
from specjax.models.network import param_shapes
from specjax.types import ModelInput

TOLERANCE = 2e-4  # in float32, of the largest logit


@pytest.fixture(scope="module")
def goldens():
    return dict(np.load(GOLDENS / "hybrids.npz"))


@jax.jit
def call(model, inputs, memory):
    return model.apply(model.params, inputs, memory)


def inputs_at(start, num_tokens, size=None, ids=None):
    """A call with tokens of the recorded row, as a chunk of a prompt padded to `size`, or as a step."""
    ids = tokens() if ids is None else ids
    part = ids[:, start : start + (size or num_tokens)]
    part = np.pad(part, ((0, 0), (0, (size or num_tokens) - part.shape[1])), constant_values=3)
    positions = np.broadcast_to(start + np.arange(part.shape[1], dtype=np.int32), part.shape)
    count = None if size is None else jnp.full(part.shape[0], num_tokens, jnp.int32)
    return ModelInput(jnp.asarray(part), jnp.asarray(positions), num_tokens=count)


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_the_recorded_ones(case, goldens, tmp_path):
    """Of the whole row, and of a prompt whose chunks end around the chunks of the delta rule."""
    model, expected = load(write(tmp_path / case, case)), goldens[case]
    shapes = param_shapes(model.apply.network, model.apply.config)
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(jnp.shape, shapes)
    output, _ = call(model, inputs_at(0, NUM_TOKENS), None)
    assert np.abs(output.logits - expected).max() / np.abs(expected).max() <= TOLERANCE
    memory = model.init_memory(1, 1, NUM_TOKENS)
    start = 0
    for count in (63, 1, 64, 1, 2):
        output, memory = call(model, inputs_at(start, count, size=66), memory)
        found, wanted = output.logits[:, :count], expected[:, start : start + count]
        assert np.abs(found - wanted).max() / np.abs(expected).max() <= TOLERANCE
        start += count
