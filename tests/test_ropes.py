"""How heads turn in rows that are longer than the training had, and layers with different rotations."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from families import GOLDENS, LLAMA, LLAMA3_SCALING, LONGROPE, NUM_TOKENS, TWO_BASES, YARN, write
from test_families import TOLERANCE, difference, incremental_logits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specjax import LLM, SamplingParams, proposers
from specjax.engine import run
from specjax.models import load
from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model, init_params, with_room
from specjax.models.families import ropes
from specjax.models.families.llama import config_of
from specjax.models.layer import LayerConfig
from specjax.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
    frequencies,
    rotate,
    rotation,
)
from specjax.models.vocabulary import resize_vocabulary
from specjax.types import ModelInput

POSITIONS = np.array([[0, 3, 40]], np.int32)


@pytest.mark.parametrize(("length", "expected"), [(None, 100.0), (16, 100.0), (17, 100 * (4 * 17 / 16 - 3) ** (8 / 6))])
def test_dynamic_scaling_raises_the_base_past_the_trained_length(length, expected):
    found = DynamicScaling(4.0, 16, 100.0)(frequencies(8, 100.0), length)
    np.testing.assert_allclose(found, expected ** (-np.arange(4) / 4), rtol=1e-5)


@pytest.mark.parametrize("high", [1.0, 4.0])
def test_llama3_scaling_is_that_of_transformers(high):
    """Llama 4 Scout has no frequencies between low ones and high ones."""
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": high}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=scaling)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, None)
    found = Llama3Scaling(16.0, 1.0, high, 8192)(frequencies(64, 5e5))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert len({*np.round(np.asarray(found / frequencies(64, 5e5)), 3)}) == (2 if high == 1 else 5)


def test_longrope_takes_the_list_of_the_room_of_a_row():
    scaling = LongRopeScaling((1.0, 2.0), (4.0, 8.0), 16, 1.5)
    for length, divisors in ((None, [1, 2]), (16, [1, 2]), (17, [4, 8])):
        cos, sin = rotation(POSITIONS, 4, 100.0, scaling, length=length)
        angle = np.asarray(POSITIONS)[..., None] * np.array([1.0, 0.1]) / divisors
        np.testing.assert_allclose(cos, 1.5 * np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(sin, 1.5 * np.sin(angle), atol=1e-5)


def test_proportional_scaling_turns_the_first_pairs_of_a_whole_head():
    found = ProportionalScaling(1, 2.0)(frequencies(8, 100.0), 99)
    np.testing.assert_allclose(found, [0.5, 0, 0, 0])


def test_numbers_past_the_turned_ones_stay():
    """The first four of seven turn, as a whole head of four numbers does."""
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 7)).astype(np.float32)
    turned = np.asarray(rotate(x, rotation(POSITIONS, 7, 100.0, turned=4)))
    np.testing.assert_array_equal(turned[..., :4], rotate(x[..., :4], rotation(POSITIONS, 4, 100.0)))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    assert not np.allclose(turned[:, 1:, :, :4], x[:, 1:, :, :4])


def test_layers_have_rotations_of_their_own(tmp_path):
    config = load(write(tmp_path / "model", "gemma3_capped")).apply.config
    ropes = [layer.mixer.rope for layer in config.layers]
    assert ropes == [None, Rope(TWO_BASES["sliding_attention"]["rope_theta"])]
    assert config.rope.theta == 500.0 and config.rope.scaling.factor == 4.0


@pytest.mark.parametrize("case", ["llama_dynamic"])
def test_logits_of_a_cache_that_is_as_long_as_the_rows(case, tmp_path):
    """The whole rows of `test_families.py` have room for their own tokens alone, as transformers takes it."""
    model, expected = load(write(tmp_path / case, case)), np.load(GOLDENS / "logits.npz")[case]
    assert difference(incremental_logits(model, num_slots=NUM_TOKENS), expected) <= TOLERANCE


@pytest.mark.parametrize("max_length", [None, 64])
def test_heads_turn_by_the_longest_request_and_not_by_its_drafts(max_length, monkeypatch):
    """A row of 32 tokens turns as one of 32 slots does, though drafts need more; with a limit, as one of that size."""
    monkeypatch.setattr(run, "LEAST_LENGTH", 32)
    scaling = LongRopeScaling((1.0,) * 4, (1.0, 2.0, 4.0, 8.0), 32)
    config = DecoderConfig(29, 16, 1, 2, 1, 8, 16, 64, rope_scaling=scaling)
    model = decoder_model(config, jax.tree.map(lambda x: 40 * x, init_params(config, 0)))
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(29)}, "w0"))
    llm = LLM.of(model, tokenizer, proposers.ngram(8), num_slots=1, max_length=max_length)
    (result,) = llm.generate([range(8)], SamplingParams(temperature=0, max_tokens=24))
    row = np.zeros((1, max_length or 32), np.int32)
    row[0, :32] = [*range(8), *result.token_ids]
    positions = np.arange(row.shape[1], dtype=np.int32)[None]
    output, _ = jax.jit(model.apply)(model.params, ModelInput(row, positions), None)
    assert np.argmax(output.logits[0, 7:31], axis=-1).tolist() == result.token_ids


def test_a_model_with_another_vocabulary_has_the_room_of_its_sequences():
    config = DecoderConfig(29, 16, 1, 2, 1, 8, 16, 64, rope_scaling=LongRopeScaling((1.0,) * 4, (2.0,) * 4, 32))
    model = resize_vocabulary(decoder_model(config, init_params(config, 0)), 31)
    assert with_room(model, 40).apply.apply.config.room == 40
    assert with_room(model, 99).apply.apply.config.room == 64
    config = replace(config, rope_scaling=None)
    plain = decoder_model(config, init_params(config, 0))
    assert with_room(plain, 40).apply == plain.apply


def test_heads_refuse_kinds_that_depend_on_the_length(tmp_path):
    fields = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"rope_scaling\.rope_type in .* must be 'default' or .*, got 'dynamic'"):
        config_of(ConfigFile(tmp_path, fields), (LayerConfig(),))


NULLS = [  # of a table of YaRN, with what they change in `SCALED`
    ({"truncate": None}, {"truncate": False}),
    ({"beta_fast": None}, {"beta_fast": 32.0}),
    ({"beta_slow": None}, {"beta_slow": 1.0}),
    ({"mscale": None}, {"magnitude": 0.1 * math.log(4) + 1}),
    ({"attention_factor": None}, {}),
    ({"factor": None}, {"factor": 6.0, "magnitude": (0.2 * math.log(6) + 1) / (0.05 * math.log(6) + 1)}),
]
TABLE = YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": True, "beta_slow": 0.5}
SCALED = YarnScaling(4.0, 16, 1e4, 2.0, 0.5, True, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize(("change", "expected"), NULLS)
def test_nulls_in_a_table(change, expected, tmp_path):
    config = ConfigFile(tmp_path, {"rope_parameters": TABLE | change, "max_position_embeddings": 96})
    assert ropes.read(config, 8) == Rope(1e4, replace(SCALED, **expected))


@pytest.mark.slow
@pytest.mark.parametrize("change", [change for change, _ in NULLS])
def test_nulls_are_those_of_transformers(change, tmp_path):
    pytest.importorskip("torch")
    import reference
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    table = TABLE | change | {"original_max_position_embeddings": 500}  # else rounding changes nothing
    fields = LLAMA | {"rope_parameters": table, "max_position_embeddings": 3000}
    theirs = LlamaRotaryEmbedding(reference.config(fields | {"model_type": "llama"}))
    ours = ropes.read(ConfigFile(tmp_path, fields), 8)
    np.testing.assert_allclose(ours.scaling(frequencies(8, ours.theta)), theirs.inv_freq, rtol=1e-5)
    assert ours.scaling.magnitude == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("table", "beside", "name"),
    [
        (YARN | {"original_max_position_embeddings": None}, {}, "rope_scaling.original_max_position_embeddings"),
        (LLAMA3_SCALING, {"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        (LONGROPE | {"rope_theta": None}, {"rope_theta": 500.0}, "rope_scaling.rope_theta"),
        (YARN, {"rope_theta": None}, "rope_theta"),
        (YARN | {"rope_type": None, "type": "yarn"}, {}, "rope_scaling.rope_type"),
        (YARN | {"partial_rotary_factor": None}, {}, "rope_scaling.partial_rotary_factor"),
    ],
)
def test_nulls_that_transformers_does_not_take(table, beside, name, tmp_path):
    fields = {"rope_scaling": table, "max_position_embeddings": 96} | beside
    with pytest.raises(ValueError, match=rf"^{name} in .* must be absent or have a value, got null"):
        ropes.read(ConfigFile(tmp_path, fields), 8)


def test_a_table_of_each_version_of_transformers(tmp_path):
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    fields = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": new, "max_position_embeddings": 96}
    config = ConfigFile(tmp_path, fields)
    assert ropes.read(config, 16) == Rope(500.0, LinearScaling(2.0))
    config.check_computation()
    for table in ({"type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 2.0}):
        with pytest.raises(ValueError, match=r"rope_scaling in .* must be absent or say what rope_parameters says"):
            ropes.read(ConfigFile(tmp_path, fields | {"rope_scaling": table}), 16)


def test_a_null_beside_the_table_turns_whole_heads(tmp_path):
    fields = {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default"}}
    assert ropes.read(ConfigFile(tmp_path, fields), 8, rotary_factor=0.5) == Rope()
    assert ropes.read(ConfigFile(tmp_path, {}), 8, rotary_factor=0.5) == Rope(size=4)


THETAS = {"full_attention": 10.0, "sliding_attention": 20.0}


def test_bounds_of_yarn_in_the_wrong_order():
    """The ramp then falls, as in transformers."""
    found = YarnScaling(4.0, 512, 1e4, 0.5, 8.0)(np.ones(8, np.float32))
    np.testing.assert_allclose(found, [0.25] * 4 + [1.0] * 4)


@pytest.mark.parametrize(
    ("fields", "local", "full", "sliding"),
    [
        ({"rope_theta": 5.0}, None, Rope(5.0), Rope(20.0)),
        ({"rope_theta": 5.0, "rope_local_base_freq": 6.0}, "rope_local_base_freq", Rope(5.0), Rope(6.0)),
        ({"rope_theta": 5.0, "rope_parameters": {"full_attention": None}}, None, Rope(5.0), Rope(20.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None, Rope(10.0, LinearScaling(2.0)), Rope(20.0)),
        (
            {"rope_scaling": YARN | {"truncate": None}, "original_max_position_embeddings": 8},
            None,
            Rope(10.0, YarnScaling(4.0, 16, 10.0, 2.0, 1.0, True, 0.1 * math.log(4) + 1)),
            Rope(20.0),
        ),
    ],
)
def test_tables_by_the_type_of_layers(fields, local, full, sliding, tmp_path):
    """As in transformers, rope_theta is of full layers alone, and the last case has two fields that are not read."""
    config = ConfigFile(tmp_path, fields | {"max_position_embeddings": 96})
    found = ropes.read_types(config, dict.fromkeys(ropes.TYPES, 8), THETAS, local=local)
    assert found == {"full_attention": full, "sliding_attention": sliding}


def test_bounds_that_tables_by_type_cannot_say(tmp_path):
    fields = {"rope_parameters": {"full_attention": YARN}, "max_position_embeddings": 96}
    with pytest.raises(ValueError, match=r"rope_parameters.full_attention.truncate in .* must be True, the only"):
        ropes.read_types(ConfigFile(tmp_path, fields), dict.fromkeys(ropes.TYPES, 8), THETAS)
