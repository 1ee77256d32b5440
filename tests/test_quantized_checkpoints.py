"""Checkpoints with quantised matrices: loaded, rounded when they are loaded, shared by devices, and decoded."""

import json
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_files as files
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from test_checkpoint import CONFIG, make_tensors, tensor_shapes, write
from test_llm import PROMPTS, write_pair

import specjax
from specjax import SamplingParams, models
from specjax.models.config_file import ConfigFile
from specjax.models.quantization.compressed_tensors import CompressedTensors
from specjax.models.quantized import NF4, Quantized, dequantize, quantize
from specjax.types import ModelInput

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 48}
BASE = CONFIG | SIZES | {"tie_word_embeddings": False}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 9)).astype(np.int32)


def compressed(layout, **weights):
    group = {"targets": ["Linear"], "format": layout, "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def of_modelopt(rng, n, k, in_fp8):
    return files.fp8(rng, n, k, name="weight_scale") if in_fp8 else files.nvfp4(rng, n, k, "modelopt")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
FORMATS = {
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda rng, n, k: files.fp8(rng, n, k, (32, 32)),
    ),
    "fp8": ({"quant_method": "fp8"}, lambda rng, n, k: files.fp8(rng, n, k, name="weight_scale")),
    "gptq": (GPTQ, lambda rng, n, k: files.gptq(rng, n, k, 32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, lambda rng, n, k: files.awq(rng, n, k, 32)),
    "auto-round": (AUTO_ROUND, lambda rng, n, k: files.gptq(rng, n, k, 32)),
    "auto-round as awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        lambda rng, n, k: files.awq(rng, n, k, 32),
    ),
    "gptq mixed": (
        GPTQ | {"dynamic": {"-:lm_head": {}, r".*\.down_proj": {"bits": 8, "group_size": -1}}},
        lambda rng, n, k: files.gptq(rng, n, k, *((-1, 8) if k == SIZES["intermediate_size"] else (32, 4))),
    ),
    "auto-round mixed": (
        AUTO_ROUND | {"extra_config": {r".*\.down_proj": {"bits": 8, "group_size": -1}, "lm_head": {"bits": 16}}},
        lambda rng, n, k: files.gptq(rng, n, k, *((-1, 8) if k == SIZES["intermediate_size"] else (32, 4))),
    ),
    "auto-round of floats": (
        AUTO_ROUND | {"data_type": "mx_fp", "extra_config": {r".*\.down_proj": {"bits": 8}, "lm_head": {"bits": 16}}},
        lambda rng, n, k: (files.mxfp8 if k == SIZES["intermediate_size"] else files.mxfp4_packed)(rng, n, k),
    ),
    "packed": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda rng, n, k: files.packed(rng, n, k, 32, symmetric=False),
    ),
    "int4 in bytes": (
        compressed("int-quantized", num_bits=4, strategy="group", group_size=32),
        lambda rng, n, k: files.int8(rng, n, k, 32, bits=4),
    ),
    "mxfp8": (compressed("mxfp8-quantized", num_bits=8, type="float"), files.mxfp8),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), lambda rng, n, k: files.int8(rng, n, k)),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda rng, n, k: files.nvfp4(rng, n, k, "modelopt"),
    ),
    "modelopt mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
        lambda rng, *shape: of_modelopt(rng, *shape, in_fp8=max(shape) == SIZES["hidden_size"]),
    ),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        lambda rng, n, k: files.fp8(rng, n, k, name="weight_scale"),
    ),
    "torchao": ({"quant_method": "torchao"}, lambda rng, n, k: files.torchao(rng, n, k, (n, 2), True, True)),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda rng, n, k: files.bits4(rng, n, k, NF4, True),
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, files.llm_int8),
}


def layers_of(config):
    return [name for name in tensor_shapes(config) if name.endswith("_proj.weight")]


def write_both(folder, quantization, fabricate, config=BASE):
    """Write a quantised checkpoint, and a checkpoint of the floats for which it stands."""
    rng, floats = np.random.default_rng(1), make_tensors(config)
    stored = dict(floats)
    for name in layers_of(config):
        arrays, floats[name] = fabricate(rng, *floats[name].shape)
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{key}": np.array(value) for key, value in arrays.items()}
    both = folder / "quantized", folder / "floats"
    for path in both:
        path.mkdir()
    write(both[0], config | {"quantization_config": quantization}, stored)
    write(both[1], config, floats)
    return both


def logits(model, tokens=TOKENS):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model.apply(model.params, ModelInput(jnp.asarray(tokens), positions), None)[0].logits)


def is_quantized(leaf):
    return isinstance(leaf, Quantized)


def quantized_leaves(model):
    return [x for x in jax.tree.leaves(model.params, is_leaf=is_quantized) if is_quantized(x)]


@pytest.mark.parametrize("case", FORMATS)
def test_a_quantised_checkpoint_computes_what_its_floats_do(tmp_path, case):
    quantized, floats = (models.load(path) for path in write_both(tmp_path, *FORMATS[case]))
    assert len(quantized_leaves(quantized)) == 2 * 4  # in each layer qkv, gate and up, and two others
    expected = logits(floats)
    np.testing.assert_allclose(logits(quantized), expected, atol=2e-5 * np.abs(expected).max())
    assert jax.tree.structure(jax.tree.map(lambda x: 0, floats.params)) == jax.tree.structure(
        jax.tree.map(lambda x: 0, quantized.params, is_leaf=is_quantized)
    )


@pytest.mark.parametrize("case", ["packed", "fp8 blocks"])
def test_codes_become_floats_where_they_are_not_kept(tmp_path, case):
    quantized, _ = write_both(tmp_path, *FORMATS[case])
    kept, floats = models.load(quantized), models.load(models.Checkpoint(quantized, keep_codes=False))
    assert not quantized_leaves(floats)
    for layer, name in product((0, 1), ("qkv", "mlp_out")):
        codes, matrix = (m.params["layers"][layer][name] for m in (kept, floats))
        np.testing.assert_array_equal(np.asarray(dequantize(codes)).T, np.asarray(matrix))
    expected = logits(kept)
    np.testing.assert_allclose(logits(floats), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shares_order", [True, False])
def test_an_order_of_inputs_stays_where_matrices_of_one_input_share_it(tmp_path, shares_order):
    def fabricate(rng, n, k):
        return files.gptq(rng, n, k, 32, order=np.random.default_rng(k) if shares_order else True)

    paths = write_both(tmp_path, GPTQ | {"desc_act": True}, fabricate)
    quantized, floats = map(models.load, paths)
    assert len(quantized_leaves(quantized)) == (8 if shares_order else 4)
    expected = logits(floats)
    np.testing.assert_allclose(logits(quantized), expected, atol=2e-5 * np.abs(expected).max())


def test_names_without_prefix_zeros_for_biases_and_scales_of_the_cache(tmp_path):
    path, floats = write_both(tmp_path, *FORMATS["int8"])
    stored = {name.removeprefix("model."): x for name, x in load_file(path / "model.safetensors").items()}
    stored |= {"layers.0.self_attn.k_proj.bias": np.zeros(32), "layers.0.self_attn.k_scale": np.ones(1)}
    save_file(stored, path / "model.safetensors")
    expected = logits(models.load(floats))
    np.testing.assert_allclose(logits(models.load(path)), expected, atol=2e-5 * np.abs(expected).max())
    stored["layers.0.self_attn.k_proj.bias"] = np.ones(32)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"k_proj.bias .* does not belong"):
        models.load(path)


def test_groups_of_several_formats_and_matrices_that_stay_floats(tmp_path):
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*(v|down)_proj"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    config["ignore"] += ["re:.*layers.1.mlp.*"]
    rng, floats = np.random.default_rng(1), make_tensors(BASE)
    stored = dict(floats)
    for name in layers_of(BASE):
        if "layers.1.mlp" in name:
            continue
        of_8_bits = "v_proj" in name or "down" in name
        fabricate, group = (files.int8, None) if of_8_bits else (files.packed, 32)
        arrays, floats[name] = fabricate(rng, *floats[name].shape, group)
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{key}": value for key, value in arrays.items()}
    paths = tmp_path / "q", tmp_path / "f"
    for path in paths:
        path.mkdir()
    quantized = models.load(write(paths[0], BASE | {"quantization_config": config}, stored))
    expected = logits(models.load(write(paths[1], BASE, floats)))
    np.testing.assert_allclose(logits(quantized), expected, atol=2e-5 * np.abs(expected).max())
    layers = quantized.params["layers"]
    # Query and key have 4 bits and value has 8, so the three become floats.
    assert [name for name, x in layers[0].items() if is_quantized(x)] == ["attention_out", "gate_up", "mlp_out"]
    assert [name for name, x in layers[1].items() if is_quantized(x)] == ["attention_out"]


def test_fields_of_early_files(tmp_path):
    """Their status is "frozen", and a table of sparsity says that the codes are dense."""
    quantization, fabricate = FORMATS["int8"]
    sparsity = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
    early = {"quantization_status": "frozen", "sparsity_config": sparsity}
    quantized, floats = write_both(tmp_path, quantization | early, fabricate)
    expected = logits(models.load(floats))
    np.testing.assert_allclose(logits(models.load(quantized)), expected, atol=2e-5 * np.abs(expected).max())
    with pytest.raises(ValueError, match=r"sparsity_config in .* must be absent"):
        CompressedTensors.of(ConfigFile(tmp_path, quantization | {"sparsity_config": {"format": "x"}}))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("change", ["targets", "ignore", "in text_config"])
def test_codes_of_a_text_part(tmp_path, prefix, change):
    """Patterns are of the names that files have; the table stands in config.json or in its text_config."""
    quantization, fabricate = FORMATS["int8"]
    if change == "targets":
        group = quantization["config_groups"]["group_0"] | {"targets": ["re:.*language_model.*"]}
        quantization = quantization | {"config_groups": {"group_0": group}}
    elif change == "ignore":
        quantization = quantization | {"ignore": ["re:^(?!.*language_model)"]}
    path, floats = write_both(tmp_path, quantization, fabricate)
    head = "" if prefix.startswith("model.") else "language_model."
    stored = load_file(path / "model.safetensors")
    named = {prefix + k.removeprefix("model.") if k.startswith("model.") else head + k: v for k, v in stored.items()}
    save_file(named, path / "model.safetensors")
    text = BASE | {"model_type": "mistral", "sliding_window": None}
    config = {"model_type": "mistral3", "text_config": text}
    (text if change == "in text_config" else config)["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    model, expected = models.load(path), logits(models.load(floats))
    assert len(quantized_leaves(model)) == 8
    np.testing.assert_allclose(logits(model), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"model.layers.0.mlp.up_proj.lora_A": np.ones((4, 64), np.float32)}, "up_proj.lora_A .* does not belong"),
        (
            {"lm_head.weight": np.ones((48, 64), np.int8)},
            "tie_word_embeddings in config.json must be false where lm_head",
        ),
    ],
)
def test_tensors_beside_codes(tmp_path, added, message):
    path, _ = write_both(tmp_path, *FORMATS["int8"], BASE | {"tie_word_embeddings": True})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (path / "config.json").write_text(json.dumps(config))
    save_file(load_file(path / "model.safetensors") | added, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        models.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_weights_are_rounded_when_they_are_read(tmp_path, format):
    tensors = make_tensors(BASE)
    path = write(tmp_path, BASE, tensors)
    model = models.load(path, quantization=format)
    assert len(quantized_leaves(model)) == 8
    names = [f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up")]
    whole = quantize(jnp.asarray(np.concatenate([tensors[name] for name in names])), format)
    found = model.params["layers"][1]["gate_up"]
    assert model.params["layers"][1]["qkv"].bits == 8  # of few inputs, in int4, too
    np.testing.assert_array_equal(np.asarray(dequantize(found)), np.asarray(dequantize(whole)))
    assert found.dtype == jnp.float32 and model.params["head"].dtype == jnp.float32
    exact = np.concatenate([tensors[name] for name in names])
    error = np.abs(np.asarray(dequantize(found)) - exact).mean() / exact.std()
    assert error < {"int8": 0.01, "fp8": 0.03, "int4": 0.1}[format]
    assert np.isfinite(logits(model)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "number"), [("fp8 blocks", 2), ("packed", 4), ("nf4", 2), ("int8", 2), ("order", 2)])
def test_devices_share_quantised_weights(tmp_path, case, number):
    if case == "order":
        case = GPTQ | {"desc_act": True}, lambda rng, n, k: files.gptq(rng, n, k, 32, order=np.random.default_rng(k))
    else:
        case = FORMATS[case]
    path, _ = write_both(tmp_path, *case, BASE | {"vocab_size": 46})
    mesh = jax.make_mesh((number,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = TOKENS % 46
    whole = models.load(path)
    expected = logits(whole, tokens)
    inputs = ModelInput(jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(9), tokens.shape))

    @jax.jit
    def run(shared):
        def on_one(params, cache, inputs):
            return cache, shared.apply.apply(params, inputs, None)[0].logits

        return shared.apply.run(on_one, shared.params, (), inputs, P(None, None, "tensor"))[1]

    for shared in (models.load(path, mesh=mesh), models.tensor_parallel(whole, mesh)):
        assert len(quantized_leaves(shared)) >= 4
        found = np.asarray(run(shared))[..., :46]
        np.testing.assert_allclose(found, expected, atol=5e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_an_llm_of_rounded_weights_drafts_with_rounded_weights(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    target, draft = write_pair(tmp_path, num_layers=1)
    llm = specjax.LLM(target, draft, quantization="int8", draft_quantization="int4")
    rounded = models.load(target, quantization="int8").params["layers"][0]["qkv"]
    found = llm.model.params["layers"][0]["qkv"]
    if jax.default_backend() == "gpu":
        assert is_quantized(found)
    else:  # no kernel would read the codes
        np.testing.assert_array_equal(np.asarray(found), np.asarray(dequantize(rounded)).T)
    drafted, plain = llm.generate(PROMPTS[0], params)[0], llm.plain().generate(PROMPTS[0], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.num_accepted > 0


def test_wrong_quantizations(tmp_path):
    path, floats = write_both(tmp_path, *FORMATS["int8"])
    with pytest.raises(ValueError, match="quantization must be None for weights that are quantised already"):
        models.load(path, quantization="int4")
    with pytest.raises(ValueError, match=r"quantization must be None, 'int8', 'int4', 'fp8', got 'int9'; did you mean"):
        models.load(floats, quantization="int9")
    with pytest.raises(ValueError, match=r"quantization must be None, .* got array\(\['int8', 'int4'\]"):
        models.load(floats, quantization=np.array(["int8", "int4"]))
    with pytest.raises(ValueError, match=r"draft_quantization must be None, .* got 'int2'"):
        specjax.LLM(draft_quantization="int2")
    with pytest.raises(ValueError, match="draft_quantization must be None unless draft is a checkpoint"):
        specjax.LLM(draft="ngram", draft_quantization="int8")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_scale", None, "q_proj.weight_scale is missing"),
        ("weight_scale", lambda x: x * np.nan, "layers.0.self_attn.q_proj: scale must be finite"),
        ("weight_scale", lambda x: x[:-1], "q_proj.weight_scale .* must have shape"),
        ("weight", lambda x: x[:, :-1], "q_proj.weight .* must have shape"),
        ("weight", None, "q_proj.weight is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, name, change, message):
    path, _ = write_both(tmp_path, *FORMATS["int8"])
    stored = load_file(path / "model.safetensors")
    key = f"model.layers.0.self_attn.q_proj.{name}"
    stored = {k: v for k, v in stored.items() if k != key} | ({} if change is None else {key: change(stored[key])})
    save_file({k: np.ascontiguousarray(v) for k, v in stored.items()}, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_quantization_beside_the_config(tmp_path):
    path, floats = write_both(tmp_path, *FORMATS["nvfp4"])
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    expected = logits(models.load(floats))
    np.testing.assert_allclose(logits(models.load(path)), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["gptq", "packed"])
def test_codes_that_the_config_does_not_name(tmp_path, case):
    """Early tools for GPTQ wrote quantize_config.json alone; a pattern may ignore a matrix in codes."""
    path, _ = write_both(tmp_path, *FORMATS[case])
    config = json.loads((path / "config.json").read_text())
    if case == "gptq":
        (path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    else:
        config["quantization_config"]["ignore"] = ["re:.*q_proj"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"q_proj.weight is in codes in .*, so that quantization_config in"):
        models.load(path)


def test_dtype_of_what_codes_stand_for(tmp_path):
    path, floats = write_both(tmp_path, *FORMATS["packed"])
    model = models.load(path, dtype="bfloat16")
    assert all(leaf.dtype == ml_dtypes.bfloat16 for leaf in quantized_leaves(model))
    expected = logits(models.load(floats, dtype="bfloat16"))
    np.testing.assert_allclose(logits(model), expected, atol=0.03 * np.abs(expected).max())
