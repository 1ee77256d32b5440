"""Caches in float8: rounding, scales from checkpoints, and decoding without a trace of chunks and drafts."""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import ALL, make_tensor, shapes
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from test_llm import PROMPTS as PROMPTS_OF_TEXT
from test_llm import write_pair

import specjax
from pallas_kernels.attention import stored
from specjax import ModelInput, Pages, SamplingParams, decode, models, proposers, sampling
from specjax.engine import memory
from specjax.models.decoder import DecoderConfig, decoder_model, init_params

FLOAT8 = jnp.float8_e4m3fn
VOCAB = 40
CONFIG = DecoderConfig(VOCAB, 32, 2, 4, 2, 8, 64, 128, tie_embeddings=False)
PROMPTS, LENGTHS = np.arange(60).reshape(3, 20) * 7 % VOCAB, np.array([20, 9, 14])
prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size"))
generate = partial(jax.jit(decode.generate, static_argnames="max_steps"), max_steps=30)


def model_of(config=CONFIG, seed=0, scales=None):
    """A model whose weights are large, so that keys and values differ much, and whose cache is in float8."""
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, init_params(config, seed))
    if scales is not None:
        params["layers"] = {
            i: layer | {"key_scale": jnp.array(scales[0]), "value_scale": jnp.array(scales[1])}
            for i, layer in params["layers"].items()
        }
    return models.with_cache_dtype(decoder_model(config, params), "fp8")


SCALES = ([0.03, 0.7], [0.5, 0.02])


@pytest.mark.parametrize("scale", [None, 0.3])
def test_numbers_are_divided_clipped_and_rounded(scale):
    x = np.concatenate([np.linspace(-600, 600, 997), 2.0 ** np.arange(-14, 9), [448, 464, 465, np.inf, -np.inf, 0]])
    x = x.astype(np.float32)
    expected = np.clip(x if scale is None else x / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    given = stored(jnp.asarray(x), FLOAT8, None if scale is None else jnp.float32(scale))
    np.testing.assert_array_equal(np.asarray(given, np.float32), expected.astype(np.float32))
    assert np.isnan(np.asarray(stored(jnp.array([jnp.nan]), FLOAT8), np.float32)).all()
    np.testing.assert_array_equal(stored(jnp.asarray(x), jnp.float32), x)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [None, SCALES], ids=["one", "scales"])
@pytest.mark.parametrize("widths", [(1,) * 12, (5, 7), (3, 8, 1)])
def test_logits_do_not_depend_on_how_tokens_are_fed(scales, widths):
    model, tokens = model_of(scales=scales), jnp.asarray(PROMPTS[:2, :12])
    apply = jax.jit(model.apply)

    def feed(widths):
        cache, start, logits = model.init_cache(2, 16), 0, []
        for width in widths:
            positions = jnp.broadcast_to(jnp.arange(start, start + width), (2, width))
            output, cache = apply(model.params, ModelInput(tokens[:, start : start + width], positions), cache)
            logits.append(output.logits)
            start += width
        return np.concatenate(logits, axis=1)

    whole = feed((12,))
    np.testing.assert_allclose(feed(widths), whole, atol=1e-4 * np.abs(whole).max())


@pytest.mark.slow
def test_scales_bring_a_model_nearer_to_its_own_cache():
    """Keys and values of a small range, which float8 alone rounds to nothing; the scales bring them into its range."""
    tokens, config = jnp.asarray(PROMPTS[:2]), replace(CONFIG, num_layers=1)
    inputs = ModelInput(tokens, jnp.broadcast_to(jnp.arange(20), (2, 20)))

    def logits(model):
        params = model.params | {"layers": {0: dict(model.params["layers"][0])}}
        layer = params["layers"][0]
        rows = jnp.arange(layer["qkv"].shape[1]) >= CONFIG.num_heads * CONFIG.head_size  # keys and values
        layer["qkv"] = layer["qkv"] * jnp.where(rows, 2.0**-11, 2.0**11)[None]
        layer["attention_out"] = layer["attention_out"] * 2.0**11
        return np.asarray(model.apply(params, inputs, model.init_cache(2, 20))[0].logits)

    alone, scaled = model_of(config), model_of(config, scales=[[2.0**-11] * 2] * 2)
    exact = logits(replace(alone, init_cache=replace(alone.init_cache, dtype="float32")))
    near, far = (np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact) for model in (scaled, alone))
    assert near < 0.05 < 0.3 < far


def run(target, proposer, **options):
    rows = sampling.batch([SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3)
    state = prefill(target, proposer, PROMPTS, LENGTHS, rows, jax.random.key(0), max_length=64, **options)
    return np.asarray(generate(target, proposer, state).context.tokens)


@pytest.mark.slow
def test_tokens_depend_on_neither_drafts_nor_chunks_nor_pages():
    """With scales; test_an_llm_decodes compares drafts with plain decoding without scales."""
    config = replace(CONFIG, num_layers=1)
    target = model_of(config, scales=SCALES)
    plain = run(target, proposers.none())
    drafter = proposers.draft_model(model_of(config, 1, SCALES), num_draft_tokens=3)
    for proposer in (drafter, proposers.draft_model(target, 3)):  # which have one program
        np.testing.assert_array_equal(run(target, proposer), plain)
    for size in (1, 8):
        np.testing.assert_array_equal(run(target, proposers.none(), chunk_size=size), plain)
    table = np.random.default_rng(0).permutation(14)[:12].reshape(3, 4).astype(np.int32)
    np.testing.assert_array_equal(run(target, drafter, pages=Pages(table, 14, 16)), plain)
    floats = replace(target, init_cache=replace(target.init_cache, dtype="float32"))
    cache = jax.eval_shape(lambda: target.init_cache(1, 4))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(FLOAT8)}
    assert (run(floats, proposers.none()) != plain).any()  # so rounding matters here


KEYS = {  # names in files, of keys and of values
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
FP8_CACHE = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}


def write(folder, scales, names=KEYS["compressed-tensors"], quantization=FP8_CACHE, case="qwen3"):
    """A checkpoint with floats and scales of the cache of each layer."""
    folder.mkdir(exist_ok=True)
    config = ALL[case] | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: make_tensor(name, shape) for name, shape in shapes(case).items()}
    for i, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=True):
            if scale is not None:
                dtype = getattr(scale, "dtype", np.float32)
                tensors[f"model.layers.{i}.{name}"] = np.array(scale, dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


ONE_A_LAYER = [(np.float32(0.5), np.float32(0.25)), (np.float32(1), np.float32(1))]


@pytest.mark.parametrize("names", KEYS.values(), ids=KEYS)
def test_scales_are_read_from_checkpoints(tmp_path, names):
    directory = write(tmp_path, ONE_A_LAYER, names)
    first, second = models.load(directory, "bfloat16", cache_dtype="fp8").params["layers"].values()
    np.testing.assert_array_equal(first["key_scale"], np.float32([0.5, 0.5]))
    np.testing.assert_array_equal(first["value_scale"], np.float32([0.25, 0.25]))
    assert first["key_scale"].dtype == jnp.float32
    assert "key_scale" not in second  # scales of 1 cost nothing
    assert "key_scale" not in models.load(directory).params["layers"][0]
    per_head = np.array([[[0.5]], [[2.0]]], ml_dtypes.bfloat16)
    write(tmp_path, [(per_head, per_head)] * 2, names)
    params = models.load(directory, cache_dtype="fp8").params
    np.testing.assert_array_equal(params["layers"][1]["value_scale"], [0.5, 2])


def test_one_scale_for_keys_and_values(tmp_path):
    """As the first files with such scales have it. Zeros that some tools store beside scales are not read."""
    quantization = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    names = "self_attn.kv_scale", "self_attn.k_zero_point"
    directory = write(tmp_path, [(np.float32(0.5), np.float32(0))] * 2, names, quantization)
    for layer in models.load(directory, cache_dtype="fp8").params["layers"].values():
        np.testing.assert_array_equal(layer["key_scale"], np.float32([0.5, 0.5]))
        np.testing.assert_array_equal(layer["value_scale"], np.float32([0.5, 0.5]))


def test_scales_of_layers_with_other_numbers_of_heads(tmp_path):
    """Gemma 4 has two kv heads in its first layer, which slides, and one in its second."""
    write(tmp_path, [(np.float32(0.5), np.float32(0.25))] * 2, case="gemma4")
    model = models.load(tmp_path, cache_dtype="fp8")
    assert [layer["key_scale"].tolist() for layer in model.params["layers"].values()] == [[0.5, 0.5], [0.5]]
    inputs = ModelInput(jnp.asarray(PROMPTS[:1]), jnp.arange(20)[None])
    output, _ = jax.jit(model.apply)(model.params, inputs, model.init_cache(1, 20))
    assert np.isfinite(output.logits).all()


def test_scales_of_the_layers_of_a_drafter_are_not_the_models(tmp_path):
    """These layers follow the others, or have names of their own."""
    write(tmp_path, [(np.float32(0.5), np.float32(0.25))] * 2 + [(np.float32(9), np.float32(9))], case="glm4_moe")
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    others = {f"mtp.layers.0.self_attn.{kind}_scale": np.full(1, 9.0, np.float32) for kind in "kv"}
    save_file(load_file(tmp_path / "model.safetensors") | others, tmp_path / "model.safetensors")
    layers = models.load(tmp_path, cache_dtype="fp8").params["layers"]
    assert [layer["key_scale"].tolist() for layer in layers.values()] == [[0.5, 0.5]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_devices_share_heads_and_their_scales(tmp_path, number):
    """Two kv heads: one a device, or each on two devices."""
    write(tmp_path, [([0.05, 0.9], [0.7, 0.04])] * 2)
    mesh = Mesh(np.array(jax.devices("cpu")[:number]), ("tensor",))
    one, shared = models.load(tmp_path, cache_dtype="fp8"), models.load(tmp_path, mesh=mesh, cache_dtype="fp8")
    inputs = ModelInput(jnp.asarray(PROMPTS[:2]), jnp.broadcast_to(jnp.arange(20), (2, 20)))
    run = jax.jit(lambda model: model.apply(model.params, inputs, model.init_cache(2, 20))[0].logits)
    expected, logits = (np.asarray(run(model)) for model in (one, shared))
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    assert shared.init_cache(2, 20)[0]["key"].dtype == FLOAT8
    assert (
        models.with_cache_dtype(models.tensor_parallel(model_of(), mesh), "fp8").init_cache(1, 4)[0]["key"].dtype
        == FLOAT8
    )


@pytest.mark.parametrize(
    "scales, quantization, message",
    [
        ([(np.float32(np.nan), np.float32(1))], FP8_CACHE, r"k_scale must be positive and finite, got \[nan\]"),
        ([(np.float32(1), np.float32(-1))], FP8_CACHE, r"v_scale must be positive and finite, got \[-1.0\]"),
        ([([1.0] * 3, np.float32(1))], FP8_CACHE, r"k_scale must have 1 or 2 numbers"),
        (
            [(np.float32(1), None)],
            FP8_CACHE,
            r"must have scales of both keys and values of layer 0, got \['key_scale'\]",
        ),
        ([(1.0, 1.0)] * 3, FP8_CACHE, "has scales of layer 2, of 2 layers"),
        (
            ONE_A_LAYER,
            FP8_CACHE | {"kv_cache_scheme": {"type": "int", "num_bits": 8}},
            r"quantization_config.kv_cache_scheme.type .*must be 'float'",
        ),
    ],
)
def test_wrong_scales_are_refused(tmp_path, scales, quantization, message):
    directory = write(tmp_path, scales, quantization=quantization)
    with pytest.raises(ValueError, match=message):
        models.load(directory, cache_dtype="fp8")
    models.load(directory)  # nothing reads them


@pytest.mark.parametrize("wrong, hint", [("int8", ""), ("f8", "; did you mean 'fp8'"), ("", ""), (8, ""), ({}, "")])
def test_other_dtypes_are_refused(wrong, hint):
    message = f"cache_dtype must be None or 'fp8', got {wrong!r}{hint}"
    for call in (specjax.LLM, partial(models.load, models.EMBEDDED / "target")):
        with pytest.raises(ValueError) as error:
            call(cache_dtype=wrong)
        assert message in str(error.value)
    own = replace(model_of(), init_cache=lambda batch_size, max_length: None)
    with pytest.raises(ValueError, match="model must be one that specjax built, for a cache of another dtype"):
        models.with_cache_dtype(own, "fp8")
    assert models.with_cache_dtype(own, None) is own


def test_a_device_has_room_for_twice_the_pages_of_bfloat16(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    config = replace(CONFIG, num_layers=8)
    target = models.with_cache_dtype(
        decoder_model(config, jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_params(config, 0))), None
    )
    sizes = {"num_slots": 64, "max_length": 128, "page_size": 16, "chunk_size": 16}
    half, full = (
        memory.num_pages_that_fit(models.with_cache_dtype(target, dtype), proposers.none(), **sizes)
        for dtype in (None, "fp8")
    )
    assert full in (2 * half, 2 * half + 1)
    assert full < 64 * 8


@pytest.mark.slow
def test_the_loss_of_the_embedded_target_grows_little(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    script = importlib.import_module("rounding_loss")
    model, rows = models.load(models.EMBEDDED / "target"), script.rows_of(["queue"], 512)[:4]
    plain, rounded = (script.mean_loss(models.with_cache_dtype(model, dtype), rows) for dtype in (None, "fp8"))
    assert plain != rounded < 1.003 * plain


@pytest.mark.slow
def test_an_llm_decodes(tmp_path):
    """Greedy output of drafts equals plain output; the caches of target and draft have the dtype."""
    target, draft = write_pair(tmp_path, num_layers=1)
    llm = specjax.LLM(target, draft, cache_dtype="fp8")
    leaves = jax.tree.leaves(jax.eval_shape(lambda: (llm.model.init_cache(1, 4), llm.proposer.init(1, 4).pools)))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(FLOAT8)}
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    results = llm.generate(PROMPTS_OF_TEXT, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in llm.plain().generate(PROMPTS_OF_TEXT, params)]
    assert sum(r.metrics.num_accepted for r in results) > 0
