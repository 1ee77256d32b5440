"""The module for multi-token prediction of Nemotron 3: recorded logits, decoding with it, and bad files."""

import json

import heads
import hybrids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from families import GOLDENS
from safetensors.numpy import load_file
from test_families import TOLERANCE
from test_hybrid_steps import whole
from test_mtp_layers import rows_of

from specjax import LLM, SamplingParams, models, proposers
from specjax.models.experts import Experts
from specjax.models.layer import MLP

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint as it is released: the model has another prefix than the module."""
    fields = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    config = hybrids.CONFIGS[hybrids.MTP] | fields
    path = tmp_path_factory.mktemp("nemotron") / "model"
    return hybrids.write(path, hybrids.MTP, config, prefix="backbone.", has_mtp=True)


@pytest.fixture(scope="module")
def target(directory):
    return models.load(directory)


def test_logits_are_the_recorded_ones(directory, target):
    assert proposers.kind_of(directory) == "mtp"
    drafter = proposers.load(directory, target, num_draft_tokens=2)
    ids = jnp.asarray(hybrids.tokens())
    hidden = drafter.head.feature(drafter.params, heads.features_of(target, ids))[0]
    _, logits = rows_of(drafter, ids[0, 1:], hidden[:-1])
    expected = np.load(GOLDENS / "hybrids.npz")[f"{hybrids.MTP}_mtp"]
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.slow
def test_text_is_that_of_the_target(directory, target):
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    llm = LLM(directory, "mtp", num_draft_tokens=2, dtype="float32", max_length=32)
    (result,) = llm.generate([[3, 4, 5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    made = result.completions[0].token_ids
    likely = np.asarray(whole(target, np.array([[3, 4, 5, 6, 7, *made]], np.int32)).argmax(axis=2))
    assert len(made) == 12 and made == likely[0, 4:-1].tolist()
    assert result.metrics.num_drafted > 0


def test_names_and_patterns(directory, target, tmp_path):
    """transformers 5 writes kinds in place of a pattern. A module may have an MLP in place of experts."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    del config["mtp_hybrid_override_pattern"]
    expected = proposers.load(directory, target, num_draft_tokens=2)
    named = heads.write(tmp_path / "named", config | {"mtp_layers_block_type": ["full_attention", "moe"]}, tensors)
    found = proposers.load(named, target, num_draft_tokens=2)
    assert found.head == expected.head and isinstance(found.head.config.layers[0].ffn, Experts)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    mlp = {f"mtp.layers.1.mixer.{name}_proj.weight": np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    mlp |= {name: x for name, x in tensors.items() if not name.startswith("mtp.layers.1.mixer.")}
    other = heads.write(tmp_path / "mlp", config | {"mtp_hybrid_override_pattern": "*-"}, mlp)
    assert isinstance(proposers.load(other, target, num_draft_tokens=2).head.config.layers[0].ffn, MLP)


SHAPES = {"up": (48, 32), "down": (32, 48)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_hybrid_override_pattern": "M"}, "mtp_hybrid_override_pattern in .* must be one layer that attends and"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers in .* must be 1, the only value"),
        ({"vocab_size": 60}, "target must have the vocabulary and hidden size of .*, 60 and 32, got"),
        ({"moe_latent_size": 8}, r"tensor mtp.layers.1.mixer.fc1_latent_proj.weight in .* must have shape \(8, 32\)"),
    ],
)
def test_bad_fields(fields, message, directory, target, tmp_path):
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        proposers.load(heads.write(tmp_path / "bad", config | fields, tensors), target, num_draft_tokens=2)


def test_bad_files(directory, target, tmp_path):
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    with pytest.raises(ValueError, match="rope_theta must be None for a drafter without rotary positions"):
        proposers.load(directory, target, num_draft_tokens=2, rope_theta=1e4)
    tensors.pop("mtp.layers.1.final_layernorm.weight")
    other = heads.write(tmp_path / "bad", config, tensors)
    with pytest.raises(ValueError, match=r"tensor mtp.layers.1.final_layernorm.weight is missing"):
        proposers.load(other, target, num_draft_tokens=2)
