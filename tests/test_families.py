"""Every family's logits equal transformers' logits: recorded ones everywhere, live ones where it is installed."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ALL, CONFIGS, GOLDENS, LENGTHS, NUM_TOKENS, tokens, write
from paged import poisoned, random_table
from released import RELEASED, fields_of

from specjax.models import load
from specjax.models.network import param_shapes
from specjax.types import Model, ModelInput

TOLERANCE = 2e-4  # in float32, of the largest logit
HALF_TOLERANCE = 0.1  # in bfloat16, of the root mean square; it rounds to 0.004, and these weights amplify that


@pytest.fixture(scope="module")
def goldens():
    return dict(np.load(GOLDENS / "logits.npz"))


def whole_logits(model: Model) -> jax.Array:
    """Logits of whole rows, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(NUM_TOKENS)[None], (len(LENGTHS), NUM_TOKENS))
    return jax.jit(model.apply)(model.params, ModelInput(jnp.asarray(tokens()), positions), None)[0].logits


def incremental_logits(model: Model, num_slots: int = NUM_TOKENS + 1, in_pages: bool = False) -> np.ndarray:
    """Logits of rows fed in three calls of four tokens: prompts of different lengths, then from where each row is.

    In pages, the cache is a pool of NaN.
    """
    apply, pages = jax.jit(model.apply), None
    cache = model.init_cache(len(LENGTHS), num_slots)
    if in_pages:
        pages, cache = jnp.asarray(random_table((len(LENGTHS), 4), 20)), poisoned(model.init_cache(20, 4))
    logits = np.full((len(LENGTHS), NUM_TOKENS, model.vocab_size), np.nan, np.float32)
    for starts in ((0, 0), (4, 2), (8, 5)):
        columns = np.array(starts)[:, None] + np.arange(4)[None]
        rows = np.arange(len(LENGTHS))[:, None]
        inputs = ModelInput(jnp.asarray(tokens()[rows, columns]), jnp.asarray(columns), pages=pages)
        output, cache = apply(model.params, inputs, cache)
        logits[rows, columns] = output.logits
    return logits


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference where a row has tokens, relative to the largest logit."""
    is_token = np.arange(NUM_TOKENS) < np.array(LENGTHS)[:, None]
    logits, expected = np.asarray(logits)[is_token], expected[is_token]
    return np.abs(logits - expected).max() / np.abs(expected).max()


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference where a row has tokens, relative to the logits."""
    is_token = np.arange(NUM_TOKENS) < np.array(LENGTHS)[:, None]
    logits, expected = np.asarray(logits)[is_token], expected[is_token]
    return np.linalg.norm(logits - expected) / np.linalg.norm(expected)


# The cases that find the breaks of families.
FAST = (
    "llama",
    "llama3_beside",
    "gemma3",
    "gemma4_small",
    "gemma4_unified",
    "deepseek_v3",
    "glm4",
    "hunyuan",
    "cohere",
    "cwm_default",
    "afmoe",
    "ernie4_5_moe",
    "llama4",
    "gpt2_untied",
    "apertus",
    "dots1",
    "phi",
    "starcoder2",
    "gpt_neox",
    "stablelm",
    "olmo",
    "nemotron",
    "falcon",
    "cohere2_moe",
    "granite_swa",
    "hy_v3",
    "flex_olmo",
    "minicpm3",
    "helium",
    "hyperclovax",
    "vaultgemma",
    "sarvam_moe",
    "nanochat",
    "phimoe",
    "mimo_v2_flash",
)


@pytest.mark.parametrize("case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in ALL])
def test_logits_are_the_recorded_ones(case, goldens, tmp_path):
    model = load(write(tmp_path / case, case))
    shapes = param_shapes(model.apply.network, model.apply.config)
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(jnp.shape, shapes)
    assert difference(whole_logits(model), goldens[case]) <= TOLERANCE
    if case != "llama_dynamic":  # a slot more turns the rows otherwise; test_ropes.py has a cache of their size
        in_pages = case not in CONFIGS  # those are fed in pages in test_paged.py
        assert difference(incremental_logits(model, in_pages=in_pages), goldens[case]) <= TOLERANCE


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("case", ["llama", "opt"])
def test_documents_of_one_row(case, tmp_path):
    """Without a cache a mask keeps two documents of a row apart, as training asks for."""
    model = load(write(tmp_path / case, case))
    apply, ids, place = jax.jit(model.apply), jnp.asarray(tokens()[:1, :8]), jnp.arange(4, dtype=jnp.int32)[None]
    document = jnp.arange(8) // 4
    mask = jnp.tri(8, dtype=bool) & (document[:, None] == document[None])
    both, _ = apply(model.params, ModelInput(ids, jnp.tile(place, (1, 2)), mask[None]), None)
    alone, _ = apply(model.params, ModelInput(ids.reshape(2, 4), jnp.tile(place, (2, 1))), None)
    np.testing.assert_allclose(both.logits.reshape(2, 4, -1), alone.logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_bfloat16(case, goldens, tmp_path):
    model = load(write(tmp_path / case, case, jnp.bfloat16), jnp.bfloat16)
    logits = whole_logits(model)
    assert logits.dtype == jnp.float32
    assert distance(logits, goldens[case]) <= HALF_TOLERANCE


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import reference

    return reference


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_those_of_transformers(case, reference, goldens, tmp_path):
    """On the checkpoint that transformers itself writes."""
    hf_model = reference.make_model(CONFIGS[case])
    hf_model.save_pretrained(tmp_path / case, max_shard_size="20KB")
    expected = reference.logits(hf_model, tokens(), LENGTHS)
    assert difference(expected, goldens[case]) <= TOLERANCE / 10
    model = load(tmp_path / case)
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(incremental_logits(model), expected) <= TOLERANCE

    half = reference.logits(hf_model.bfloat16(), tokens(), LENGTHS)
    hf_model.save_pretrained(tmp_path / "half")
    ours = whole_logits(load(tmp_path / "half", jnp.bfloat16))
    assert distance(ours, expected) <= 2 * distance(half, expected) + 1e-3


@pytest.mark.parametrize("name", RELEASED)
def test_fields_of_released_checkpoints(name, tmp_path):
    case, _, differences = RELEASED[name]
    directory = write(tmp_path / case, case)
    expected = replace(load(directory).apply.config, **differences)
    (directory / "config.json").write_text(json.dumps(fields_of(name)))
    assert load(directory).apply.config == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_every_field_that_transformers_writes(case, reference, tmp_path):
    """With the defaults, in the fields of its version, which may differ from the configs here."""
    directory = write(tmp_path / case, case)
    expected = load(directory).apply.config
    (directory / "config.json").write_text(reference.config(CONFIGS[case]).to_json_string(use_diff=False))
    assert load(directory).apply.config == expected


def test_gelu_of_gemma_is_its_tanh_approximation(goldens, tmp_path):
    """The first releases say gelu; whatever hidden_activation says is not read."""
    directory = write(tmp_path / "gemma", "gemma")
    for act, activation in (("gelu", None), ("gelu", "gelu"), (None, "silu")):
        fields = {"hidden_act": act, "hidden_activation": activation}
        (directory / "config.json").write_text(json.dumps(CONFIGS["gemma"] | fields))
        assert load(directory).apply.config.layers[0].ffn.activation == "gelu_tanh"
    assert difference(whole_logits(load(directory)), goldens["gemma"]) <= TOLERANCE / 10


def test_gelu_of_gemma2_is_what_hidden_activation_says(goldens, tmp_path):
    gelu = load(write(tmp_path / "gelu", "gemma2_gelu"))
    assert difference(whole_logits(gelu), goldens["gemma2_gelu"]) <= TOLERANCE / 10
    directory = write(tmp_path / "gemma2", "gemma2")
    for activation, expected in (("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), (None, "gelu_tanh")):
        fields = {"hidden_act": "gelu" if activation is None else "silu", "hidden_activation": activation}
        (directory / "config.json").write_text(json.dumps(CONFIGS["gemma2"] | fields))
        assert load(directory).apply.config.layers[0].ffn.activation == expected


def test_heads_of_opt_must_be_even_parts(tmp_path):
    directory = write(tmp_path / "opt", "opt")
    (directory / "config.json").write_text(json.dumps(CONFIGS["opt"] | {"num_attention_heads": 5}))
    with pytest.raises(ValueError, match=r"hidden_size in .* must be a multiple of num_attention_heads = 5, got 32"):
        load(directory)
