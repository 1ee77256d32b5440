"""The layer for multi-token prediction of DeepSeek V3 and GLM: recorded logits, decoding with it, and bad files."""

import json

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ALL, GOLDENS, MTP, make_tensor, mtp_shapes, tokens, write
from safetensors.numpy import load_file, save_file
from test_families import TOLERANCE

from specjax import models, proposers
from specjax.types import ModelInput

pytestmark = pytest.mark.usefixtures("float32_products")
PROJECTION = "model.layers.2.eh_proj.weight"


def write_with_layer(directory, case: str, **fields):
    write(directory, case, config=ALL[case] | fields)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: make_tensor(name, shape) for name, shape in mtp_shapes(case).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The target and the drafter of each case."""
    found = {}
    for case in MTP:
        directory = write_with_layer(tmp_path_factory.mktemp(case) / "x", case)
        assert proposers.kind_of(directory) == "mtp"
        target = models.load(directory)
        found[case] = target, proposers.load(directory, target, num_draft_tokens=2)
    return found


@jax.jit
def rows_of(drafter, ids, feature):
    """The outputs and logits of rows with the tokens [T] and features [T, H] of the tokens before them, from slot 1."""
    positions = jnp.arange(1, len(ids) + 1, dtype=jnp.int32)[None]
    output, _ = drafter.head(drafter.params, ModelInput(ids[None], positions), feature[None], None)
    return output[0], drafter.head.logits(drafter.params, output)[0]


@pytest.mark.parametrize("case", MTP)
def test_logits_are_the_recorded_ones(case, loaded):
    target, drafter = loaded[case]
    ids = jnp.asarray(tokens()[:1])
    hidden = drafter.head.feature(drafter.params, heads.features_of(target, ids))[0]
    _, logits = rows_of(drafter, ids[0, 1:], hidden[:-1])
    expected = np.load(GOLDENS / "mtp.npz")[case]
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.slow
def test_greedy_tokens_in_pages(loaded):
    """Rows of several lengths have the tokens with the largest logits of whole sequences, by drafts that are used."""
    target, drafter = loaded["deepseek_v3"]
    rows, _ = heads.generate(target, drafter, in_pages=True, temperature=0)
    ids = jnp.asarray([row + [0] * (heads.SIZE - len(row)) for row in rows])
    best = jnp.argmax(drafter.head.logits(drafter.params, heads.features_of(target, ids).hidden), axis=-1)
    for row, prompt, expected in zip(rows, heads.LENGTHS, np.asarray(best), strict=True):
        assert len(row) == heads.SIZE and row[prompt:] == expected[prompt - 1 : heads.SIZE - 1].tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type in .* must be 'deepseek_v3' or 'glm4_moe' or 'glm4_moe_lite'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers in .* must be 1, the only value"),
        ({"vocab_size": 60}, "target must have the vocabulary and hidden size of .*, 60 and 32, got"),
        ({"num_hidden_layers": 3}, r"tensor model.layers.3.input_layernorm.weight is missing"),
        ({"kv_lora_rank": 16}, r"kv_a_proj_with_mqa.weight in .* must have shape \(20, 32\)"),
    ],
)
def test_bad_fields(fields, message, loaded, tmp_path):
    directory = write_with_layer(tmp_path / "model", "deepseek_v3")
    (directory / "config.json").write_text(json.dumps(ALL["deepseek_v3"] | fields))
    with pytest.raises(ValueError, match=message):
        proposers.load(directory, loaded["deepseek_v3"][0], num_draft_tokens=2)
