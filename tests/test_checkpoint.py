"""Loading Hugging Face checkpoints: the numbers against a Llama in numpy, and every way a directory can be wrong."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_tokenizer import make_tokenizer

from specjax import proposers
from specjax.models import directory as opening
from specjax.models import load, tensors
from specjax.models.decoder import param_shapes
from specjax.models.directory import Checkpoint
from specjax.models.families import BUILD
from specjax.models.tensors import Tensors
from specjax.types import ModelInput

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 10,
    "max_position_embeddings": 32,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
UNTIED = CONFIG | {"tie_word_embeddings": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 16,
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def tensor_shapes(config):
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.input_layernorm": (hidden,),
            f"model.layers.{i}.self_attn.q_proj": (query, hidden),
            f"model.layers.{i}.self_attn.k_proj": (key_value, hidden),
            f"model.layers.{i}.self_attn.v_proj": (key_value, hidden),
            f"model.layers.{i}.self_attn.o_proj": (hidden, query),
            f"model.layers.{i}.post_attention_layernorm": (hidden,),
            f"model.layers.{i}.mlp.gate_proj": (mlp, hidden),
            f"model.layers.{i}.mlp.up_proj": (mlp, hidden),
            f"model.layers.{i}.mlp.down_proj": (hidden, mlp),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def make_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}


def write(directory, config, tensors, num_shards=1):
    """Write a checkpoint; the tensors are dealt to the shards in turn."""
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def llama_logits(config, tensors, tokens):
    """The reference: logits [T, V] of tokens [T], in float64, from the tensors as Hugging Face names them."""
    weights = {name.removesuffix(".weight"): np.float64(tensor) for name, tensor in tensors.items()}
    num_tokens, heads, kv_heads = len(tokens), config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def split(x, num_heads):  # [H, T, D]
        return x.reshape(num_tokens, num_heads, -1).transpose(1, 0, 2)

    def rotate(x):
        half = x.shape[-1] // 2
        angle = np.arange(num_tokens)[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
        turn = np.exp(1j * angle) * (x[..., :half] + 1j * x[..., half:])
        return np.concatenate([turn.real, turn.imag], -1)

    x = weights["model.embed_tokens"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        query = rotate(split(y @ weights[f"{layer}.self_attn.q_proj"].T, heads))
        key = rotate(split(y @ weights[f"{layer}.self_attn.k_proj"].T, kv_heads)).repeat(heads // kv_heads, 0)
        value = split(y @ weights[f"{layer}.self_attn.v_proj"].T, kv_heads).repeat(heads // kv_heads, 0)
        scores = np.exp(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])) * np.tri(num_tokens)
        attended = scores / scores.sum(-1, keepdims=True) @ value
        attended = attended.transpose(1, 0, 2).reshape(num_tokens, -1)
        x = x + attended @ weights[f"{layer}.self_attn.o_proj"].T
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = y @ weights[f"{layer}.mlp.gate_proj"].T
        up = y @ weights[f"{layer}.mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj"].T
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm") @ weights[head].T


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_logits_are_those_of_llama(tmp_path, config, num_shards):
    tensors = make_tensors(config)
    model = load(write(tmp_path, config, tensors, num_shards))
    assert (model.vocab_size, model.max_length) == (11, 32)

    tokens = np.array([3, 0, 7, 7, 10, 1, 2])
    inputs = ModelInput(jnp.asarray(tokens)[None], jnp.arange(7)[None])
    logits = model.apply(model.params, inputs, None)[0].logits
    np.testing.assert_allclose(logits[0], llama_logits(config, tensors, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_parameters_have_the_wanted_dtype(tmp_path, stored, wanted):
    tensors = {name: tensor.astype(jnp.dtype(stored)) for name, tensor in make_tensors(UNTIED).items()}
    model = load(str(write(tmp_path, UNTIED, tensors)), dtype=wanted)
    shapes = param_shapes(model.apply.config)
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(jnp.shape, shapes)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(wanted)}
    assert model.init_cache(1, 4)[0]["key"].dtype == jnp.dtype(wanted)
    np.testing.assert_array_equal(
        model.params["embedding"], tensors["model.embed_tokens.weight"].astype(jnp.dtype(wanted))
    )


def test_absent_fields_take_the_defaults_of_llama(tmp_path):
    optional = ("num_key_value_heads", "head_dim", "rope_theta", "hidden_act", "attention_bias", "mlp_bias")
    config = {name: value for name, value in CONFIG.items() if name not in optional} | {"hidden_size": 16}
    config |= {"head_dim": None, "rope_scaling": None}  # null is absent
    tensors = make_tensors({**config, "head_dim": 4, "num_key_value_heads": 4})
    decoder = load(write(tmp_path, config, tensors)).apply.config
    assert (decoder.num_kv_heads, decoder.head_size, decoder.rope_theta) == (4, 4, 10000.0)


def test_rope_theta_inside_rope_parameters(tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 777, "rope_type": "default"}
    assert load(write(tmp_path, config, make_tensors(config))).apply.config.rope_theta == 777.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (4096, 4096)),
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 3}, (3, 3)),
        ({"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}, (None, 3)),
    ],
)
def test_windows(tmp_path, fields, expected):
    config = CONFIG | {"model_type": "mistral"} | fields
    assert load(write(tmp_path, config, make_tensors(config))).apply.config.windows == expected


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "chunked"], ["full_attention", []], "full"])
def test_damaged_layer_types(tmp_path, types):
    config = CONFIG | {"model_type": "mistral", "layer_types": types}
    with pytest.raises(ValueError, match=r"layer_types in .* must be (2 times 'full_attention' or|list)"):
        load(write(tmp_path, config, make_tensors(config)))


def test_equal_checkpoints_do_not_retrace(tmp_path):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    first, second = jax.tree.structure(load(tmp_path)), jax.tree.structure(load(tmp_path))
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize("dtype", ["int32", "float64", "half a float"])
def test_dtype_must_be_a_float_of_the_decoder(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"dtype must be float32, bfloat16 or float16, got .?{dtype}"):
        load(write(tmp_path, CONFIG, make_tensors(CONFIG)), dtype)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"model_type": "mamba"},
            "^specjax has no family 'mamba', .*; it has afmoe, apertus, .*/models.md.*own-models.md",
        ),
        ({"model_type": None}, "config.json must have the field model_type"),
        ({"model_type": ["llama"]}, "model_type .* must be str, got"),
        ({"hidden_act": "gelu"}, "hidden_act .* must be 'silu', the only value that specjax supports, got 'gelu'"),
        ({"attention_bias": "no"}, "attention_bias .* must be bool, got 'no'"),
        ({"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ({"mlp_bias": True}, "tensor model.layers.0.mlp.gate_proj.bias is missing"),
        ({"mlp_bias": 0}, "mlp_bias .* must be bool, got 0"),
        ({"quantization_config": {"bits": 4}}, "quant_method in .* must be one of fp8, .* got None; give"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "must have the field rope_scaling.factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "scaling.factor .* must be positive and finite, got 0",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5}}, "low_freq_factor .* most high_freq_factor = 4.0, got 5.0"),
        (
            {"rope_scaling": {"type": "ntk"}},
            "rope_scaling.type .* 'llama3' or 'yarn' .*, got 'ntk'",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type .*, got 'proportional'"),
        ({"rope_scaling": {"type": "dynamic", "factor": None}}, "must have the field rope_scaling.factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
            r"rope_scaling.short_factor in .* must be 3 positive numbers, got \[1.0\]",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention in .* must be absent",
        ),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "rope_scaling.attention_factor in .* must be absent"),
        ({"rope_scaling": LLAMA3 | {"type": "linear"}}, "rope_scaling.type in .* must be 'llama3', .*, got 'linear'"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e6}}, "rope_scaling in .* must be absent"),
        ({"rope_parameters": "yarn"}, "rope_parameters .* must be dict, got 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .* must be 1.0, .*, got 0.5"),
        ({"vocab_size": None}, "must have the field vocab_size"),
        ({"vocab_size": "11"}, "vocab_size .* must be int, got '11'"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* must be int, got True"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers .* must be in \[1, 1024\], got 1000000000"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight .* does not belong to a model"),
        ({"intermediate_size": 0}, "intermediate_size .* must be in .*, got 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps .* must be float, got 'tiny'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .* must be positive and finite, got nan"),
        ({"rope_theta": -1}, "rope_theta .* must be positive and finite, got -1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings .* must be bool, got 1"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
        ({"head_dim": None, "hidden_size": 10}, "hidden_size .* must be a multiple .* = 4, got 10"),
        ({"num_key_value_heads": 3}, "config.json: num_heads must be a multiple of num_kv_heads = 3, got 4"),
        ({"head_dim": 5}, "config.json: head_size must be even .*, got 5"),
    ],
)
def test_field_of_config(tmp_path, change, match):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match=match):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_local_experts": 8},
        {"num_experts_per_tok": 2},
        {"n_routed_experts": 64},
        {"moe_intermediate_size": 8},
        {"compression_config": {"format": "pack-quantized"}},
        {"quantization": {"bits": 4}},
        {"kv_lora_rank": 512},
        {"attention_chunk_size": 8192},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
        {"sliding_window_pattern": 6},
        {"no_rope_layers": [1, 0]},
        {"rotary_pct": 0.25},
        {"rope_interleaved": True},
        {"position_embedding_type": "alibi"},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"query_pre_attn_scalar": 256},
        {"qk_norm": True},
        {"use_qk_norm": True},
        {"clip_qkv": 8.0},
        {"use_parallel_residual": True},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"attention_multiplier": 0.0078125},
        {"logits_scaling": 8.0},
        {"mup_enabled": True},
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        {"attn_temperature_tuning": 4},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_fields_that_change_the_computation(tmp_path, change, family):
    """Fields of features that the family lacks are refused."""
    opt = {"ffn_dim": 10} if family == "opt" else {}
    write(tmp_path, CONFIG | opt | change | {"model_type": family}, make_tensors(CONFIG))
    with pytest.raises(ValueError, match=rf"^{next(iter(change))} in .*config.json must be absent"):
        load(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_dropout": 0.1, "hidden_dropout": 0.1, "initializer_range": 0.02, "layerdrop": 0.1},
        {"torch_dtype": "bfloat16", "dtype": "float32", "transformers_version": "5.0.0", "use_cache": True},
        {"architectures": ["X"], "_name_or_path": "x/y", "auto_map": {"AutoModel": "x.Y"}, "pretraining_tp": 2},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None, "id2label": {"0": "A"}, "return_dict": True},
        {"unsloth_version": "2024.9", "is_llama_config": True, "neftune_noise_alpha": 5.0, "some_new_field": 1},
        {"num_local_experts": 0, "clip_qkv": None, "qk_layer_norms": False, "rope_interleaved": False},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0, "rotary_pct": 1.0},
        {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1], "moe_layers": [], "mup_enabled": False},
        {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 32}},
        {"rope_parameters": {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}},
    ],
)
def test_fields_that_change_nothing(tmp_path, fields):
    expected = load(write(tmp_path, CONFIG, make_tensors(CONFIG))).apply.config
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    assert load(tmp_path).apply.config == expected


@pytest.mark.parametrize(
    ("content", "match"), [('{"model_type":', "must be JSON"), ("[]", "must hold a JSON object, got list")]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path, name, content, match):
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards=2)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} {match}"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {K_PROJ: 1}])
def test_damaged_weight_map(tmp_path, weight_map):
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"weight_map in .* must map names"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(tmp_path, name):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}.*; give the directory of a whole checkpoint"):
        load(tmp_path)


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory must hold a checkpoint, got .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_directory_is_opened_once(tmp_path, monkeypatch):
    """Config, headers and tokenizer are read once, whoever asks for them, and however often."""
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    opened = []

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *a, **o: opened.append((name, path)) or function(path, *a, **o))

    count(opening, "read_json")
    count(opening.tokenizers, "load_tokenizer")
    count(tensors, "Tensors")
    checkpoint = Checkpoint(tmp_path)
    for dtype in (checkpoint.dtype, "float32"):
        target = load(checkpoint, dtype)
        proposers.kind_of(checkpoint)
        assert proposers.feature_layers(checkpoint, target) == ()
        assert checkpoint.eos_token_ids(300) == ()
        checkpoint.tokenizer()
    names = [name for name, _ in opened]
    # Files of a drafter may have other names, so their headers are read apart from the model's.
    assert sorted(names) == ["Tensors", "Tensors", "load_tokenizer", "read_json"]


def test_each_reader_of_config_json_notes_its_own_fields(tmp_path):
    """Else a field that one reader knows would count as read for another, which ignores it."""
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.config.get("hidden_size", int)
    changed = checkpoint.config
    assert "hidden_size" in changed.unread()
    changed.fields["hidden_size"] = 1
    assert checkpoint.config.get("hidden_size", int) == CONFIG["hidden_size"]


def test_missing_shard(tmp_path):
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards=3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1.safetensors is missing, .*; copy the checkpoint"):
        load(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards=2)
    twice = load_file(tmp_path / "model-1.safetensors") | load_file(tmp_path / "model-0.safetensors")
    save_file(twice, tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"tensor .* must be in one file, got it in .*-0.safetensors and .*-1.safe"):
        load(tmp_path)


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"text_config": {"torch_dtype": "bfloat16"}}])
def test_dtype_of_a_file(tmp_path, fields):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dtype": "float16"}} | fields))
    assert Checkpoint(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_truncated_weights(tmp_path, num_shards, num_bytes):
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards)
    name = "model.safetensors" if num_shards == 1 else "model-1.safetensors"
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=f"{name} must be a whole safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("name", [K_PROJ, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_tensor(tmp_path, name):
    tensors = make_tensors(UNTIED)
    del tensors[name]
    with pytest.raises(ValueError, match=f"tensor {name} is missing from"):
        load(write(tmp_path, UNTIED, tensors))


@pytest.mark.parametrize("name, num_shards", [(name, 1 + i % 2) for i, name in enumerate(make_tensors(UNTIED))])
def test_wrong_shape(tmp_path, name, num_shards):
    tensors = make_tensors(UNTIED)
    tensors[name] = np.zeros((5, *tensors[name].shape), np.float32)
    with pytest.raises(ValueError, match=rf"tensor {name} in .* must have shape \(\d.*\), got \(5, "):
        load(write(tmp_path, UNTIED, tensors, num_shards))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_unexpected_dtype(tmp_path, dtype):
    tensors = make_tensors(CONFIG)
    tensors[K_PROJ] = tensors[K_PROJ].astype(jnp.dtype(dtype))
    with pytest.raises(ValueError, match=f"tensor {K_PROJ} in .* must be of type F32, BF16 or F16, got .*8"):
        load(write(tmp_path, CONFIG, tensors))


@pytest.mark.parametrize(
    ("name", "value", "stored", "wanted"),
    [
        (K_PROJ, -np.nan, "bfloat16", "float32"),
        (K_PROJ, 1e5, "float32", "float16"),
        ("model.embed_tokens.weight", -np.inf, "float16", "float32"),
        ("model.norm.weight", np.inf, "bfloat16", "bfloat16"),
    ],
)
def test_numbers_must_be_finite(tmp_path, name, value, stored, wanted):
    tensors = {key: tensor.astype(jnp.dtype(stored)) for key, tensor in make_tensors(CONFIG).items()}
    tensors[name].flat[5] = value
    with pytest.raises(ValueError, match=f"tensor {name} in .* must have finite numbers of {wanted}, got NaN, inf"):
        load(write(tmp_path, CONFIG, tensors), wanted)


def test_bits_of_finite_floats():
    for dtype in map(jnp.dtype, ("float16", "bfloat16")):
        every = np.arange(2**16, dtype=np.uint16).view(dtype)
        is_finite = np.isfinite(every.astype(np.float32))
        assert tensors._are_finite(every[is_finite])
        assert not any(map(tensors._are_finite, every[~is_finite][:, None]))


@pytest.mark.parametrize("is_same", [True, False])
def test_a_stored_head_must_equal_the_embedding_it_is_tied_to(tmp_path, is_same):
    tensors = make_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if not is_same:
        tensors["lm_head.weight"][7, 3] += 1
        with pytest.raises(ValueError, match=r"tensor lm_head.weight in .* must equal model.embed_tokens.weight"):
            load(write(tmp_path, CONFIG, tensors))
        return
    assert "head" not in load(write(tmp_path, CONFIG, tensors)).params


def test_names_without_prefix(tmp_path):
    tensors = make_tensors(UNTIED)
    expected = load(write(tmp_path, UNTIED, tensors)).params
    params = load(write(tmp_path, UNTIED, {n.removeprefix("model."): t for n, t in tensors.items()})).params
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_constants_of_old_checkpoints_are_ignored(tmp_path):
    tensors = make_tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    load(write(tmp_path, CONFIG, tensors))


def test_unexpected_tensor(tmp_path):
    tensors = make_tensors(CONFIG) | {"model.layers.0.self_attn.q_proj.bias": np.ones(24, np.float32)}
    with pytest.raises(ValueError, match=r"tensor model.layers.0.self_attn.q_proj.bias in .* does not belong to"):
        load(write(tmp_path, CONFIG, tensors))


def test_matrices_lie_transposed_on_a_gpu(tmp_path, monkeypatch):
    """Where they go decides it, and nothing else changes."""
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    tokens = jnp.array([[3, 0, 7, 7, 10, 1, 2]])
    logits = {}
    for on_one_gpu in (True, False):
        monkeypatch.setattr(Tensors, "on_one_gpu", on_one_gpu)
        model = load(tmp_path)
        layer = model.params["layers"][0]
        hidden = CONFIG["hidden_size"]
        assert layer["gate_up"].shape[on_one_gpu] == layer["qkv"].shape[on_one_gpu] == hidden
        assert layer["mlp_out"].shape[not on_one_gpu] == layer["attention_out"].shape[not on_one_gpu] == hidden
        logits[on_one_gpu] = model.apply(model.params, ModelInput(tokens, jnp.arange(7)[None]), None)[0].logits
    bound = 1e-4 if jax.default_backend() == "gpu" else 1e-5
    np.testing.assert_allclose(logits[True], logits[False], rtol=bound, atol=bound)


SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from specjax.models import load

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
whole = jax.tree.leaves(load(sys.argv[1]).params)
for spec in (PartitionSpec(), PartitionSpec("x")):
    sharding = NamedSharding(mesh, spec)
    for mine, expected in zip(jax.tree.leaves(load(sys.argv[1], sharding=sharding).params), whole, strict=True):
        assert mine.sharding == sharding
        np.testing.assert_array_equal(mine, expected)
"""


@pytest.mark.slow
def test_sharding(tmp_path):
    """Each device gets its part of the fused and transposed matrices too."""
    config = UNTIED | {"vocab_size": 14}
    write(tmp_path, config, make_tensors(config), num_shards=3)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_progress_bar_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    load(tmp_path)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    load(tmp_path)
    out, err = capsys.readouterr()
    assert (out, f"loading {tmp_path.name[:8]}" in err) == ("", True)


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**30,
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "silu",
    [],
    [1, "a"],
    {},
    {"a": 1},
]
FIELDS = [
    *CONFIG,
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "word_embed_proj_dim",
]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BUILD)
def test_fuzzed_config(tmp_path, model_type):
    """Whatever a field holds, it loads or the error is a ValueError that says where."""
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    rng = np.random.default_rng(0)
    for field in FIELDS:
        for value in VALUES:
            config = {**CONFIG, "model_type": model_type, "ffn_dim": 10, field: value}
            if rng.random() < 0.3:
                del config[rng.choice(list(CONFIG))]
            (tmp_path / "config.json").write_text(json.dumps(config))
            check_loads_or_says_where(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, LLAMA3])
def test_fuzzed_rope_scaling(tmp_path, scaling):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    for field in scaling:
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling | {field: value}}))
            check_loads_or_says_where(tmp_path)


@pytest.mark.slow
def test_fuzzed_bytes(tmp_path):
    """Bytes of the JSON files and of the safetensors headers changed, dropped or put in."""
    write(tmp_path, CONFIG, make_tensors(CONFIG), num_shards=2)
    rng = np.random.default_rng(0)
    for name in ("config.json", "model.safetensors.index.json", "model-0.safetensors"):
        whole = (tmp_path / name).read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else len(whole)
        for _ in range(150):
            content, at = bytearray(whole), rng.integers(header)
            content[at : at + rng.integers(3)] = rng.bytes(rng.integers(3))
            (tmp_path / name).write_bytes(content)
            check_loads_or_says_where(tmp_path)
        (tmp_path / name).write_bytes(whole)


def test_deeply_nested_json(tmp_path):
    write(tmp_path, CONFIG, make_tensors(CONFIG))
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config.json must be JSON"):
        load(tmp_path)


def check_loads_or_says_where(directory):
    try:
        load(directory)
    except (ValueError, FileNotFoundError) as error:
        assert re.search(r"config\.json|tensor |\.safetensors", str(error)), error


PEAK_MEMORY = """
import resource, sys
import jax
from specjax.models import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

load(sys.argv[1])  # a small one, for what is needed once
before = peak()
sizes = [leaf.nbytes for leaf in jax.tree.leaves(load(sys.argv[2], sys.argv[3]).params)]
print((peak() - before - sum(sizes)) / max(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.slow
@pytest.mark.parametrize("stored, wanted", [("F32", "float32"), ("BF16", "bfloat16"), ("F32", "bfloat16")])
def test_peak_memory(tmp_path, stored, wanted):
    """Beyond the weights, which are host memory here, loading takes at most 1.3 times the largest tensor."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    write(small, UNTIED, make_tensors(UNTIED))
    config = UNTIED | {"vocab_size": 100_000, "hidden_size": 600, "head_dim": 150, "intermediate_size": 2000}
    (large / "config.json").write_text(json.dumps(config))
    write_zeros(large / "model.safetensors", tensor_shapes(config), stored)
    done = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, str(small), str(large), wanted], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.3


def write_zeros(path, shapes, dtype):
    """A safetensors file of zeros, which takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * {"F32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with path.open("r+b") as file:
        file.truncate(8 + len(content) + end)
