"""Hybrids, whose recurrent layers keep a state that no rejected draft enters."""

import json
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_files as files
from families import GOLDENS
from hybrids import CONFIGS, HYBRID, NUM_TOKENS, SMALL, SMALL_GRANITE, tokens, write
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from test_quantized_models import rounded
from wrong_recurrent import MISTAKES, recurrent

from specjax import SamplingParams, proposers, sampling, testing
from specjax.decode import generate, prefill
from specjax.models import Checkpoint, load, tensor_parallel, with_cache_dtype, with_feature_layers
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.delta_net import DeltaNet, delta_rule
from specjax.models.experts import Experts, Shared, SigmoidTopK, Ungated
from specjax.models.families.kimi_linear import RENAMED
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.network import param_shapes
from specjax.models.quantize_files import write_quantized
from specjax.models.quantized import Quantized
from specjax.models.short_conv import ShortConv
from specjax.parallel import data_parallel
from specjax.testing import recurrent as recurrent_rows
from specjax.testing.recurrent import WIDTH, _Trial
from specjax.types import ModelInput

TOLERANCE = 2e-4  # in float32, of the largest logit


@pytest.fixture(scope="module")
def goldens():
    return dict(np.load(GOLDENS / "hybrids.npz"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_5_text", SMALL))


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("granite") / "model", "granite_h", SMALL_GRANITE))


@jax.jit
def call(model, inputs, memory):
    return model.apply(model.params, inputs, memory)


def inputs_at(start, num_tokens, size=None):
    """A call with tokens of the recorded row; with a size, a chunk of a prompt that is padded to it."""
    part = tokens()[:, start : start + (size or num_tokens)]
    part = np.pad(part, ((0, 0), (0, (size or num_tokens) - part.shape[1])), constant_values=3)
    positions = np.broadcast_to(start + np.arange(part.shape[1], dtype=np.int32), part.shape)
    count = None if size is None else jnp.full(part.shape[0], num_tokens, jnp.int32)
    return ModelInput(jnp.asarray(part), jnp.asarray(positions), num_tokens=count)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_the_recorded_ones(case, goldens, tmp_path):
    """The logits of the whole row, and of prompts whose calls end around the chunks of the delta rule, or anywhere."""
    model, expected = load(write(tmp_path / case, case)), goldens[case]
    shapes = param_shapes(model.apply.network, model.apply.config)
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(jnp.shape, shapes)
    output, _ = call(model, inputs_at(0, NUM_TOKENS), None)
    assert np.abs(output.logits - expected).max() / np.abs(expected).max() <= TOLERANCE
    rng = np.random.default_rng(0)
    splits = [(63, 1, 64, 1, 2), (64, 65), (65, 63), (1, 66, 62), *(rng.integers(0, 67, 12).tolist() for _ in range(3))]
    for counts in splits:
        start, memory = 0, model.init_memory(1, 1, NUM_TOKENS)
        for count in counts:
            output, memory = call(model, inputs_at(start, min(count, NUM_TOKENS - start), size=66), memory)
            found, wanted = output.logits[:, :count], expected[:, start : start + count]
            found = found[:, : wanted.shape[1]]
            assert np.abs(found - wanted).max(initial=0) / np.abs(expected).max() <= TOLERANCE
            start += wanted.shape[1]
        assert start >= 127


def test_images_are_left_out(tmp_path, hybrid):
    """A checkpoint that takes images, too, has the fields and tensors of its text part inside others."""
    config = {"model_type": "qwen3_5", "text_config": SMALL, "vision_config": {"depth": 2}}
    model = load(write(tmp_path / "images", "qwen3_5_text", config, prefix="model.language_model."))
    assert model.apply.config == hybrid.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, hybrid.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fields_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "qwen3_5_text")
    for fields, message in (
        ({"linear_num_value_heads": 3}, "linear_num_value_heads in .* must be a multiple of linear_num_key_heads = 2"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types in .* must be 3 times"),
        ({"hidden_act": "gelu"}, "hidden_act in .* must be"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type in .* must be 'silu' or 'swish'"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["qwen3_5_text"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)
    (directory / "config.json").write_text(json.dumps(CONFIGS["qwen3_5_text"] | {"output_gate_type": "swish"}))
    load(directory)


def test_fields_of_mamba_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "granite_h")
    for fields, message in (
        ({"mamba_n_heads": 3}, "mamba_n_heads in .* must divide the width of Mamba-2 = 64 and be a multiple of"),
        ({"mamba_d_head": 8}, "mamba_d_head in .* must be"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit in .* must be \[0.0, inf\], .* got \[0.0, 0.1\]"),
        ({"layer_types": ["mamba"] * 3}, "layer_types in .* must be 3 times 'mamba' or 'attention'"),
        ({"mamba_proj_bias": True}, "in_proj.bias"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["granite_h"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)


def test_fields_of_nemotron_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "nemotron_h_moe")
    for fields, message in (
        ({"hybrid_override_pattern": "MEM*"}, "hybrid_override_pattern in .* must say of 5 layers whether they are"),
        ({"hybrid_override_pattern": "MEMEM"}, "attention, an MLP or experts, the second at least once, got 'MEMEM'"),
        ({"hybrid_override_pattern": "ME*EX"}, "hybrid_override_pattern in .* got 'ME[*]EX'"),
        (
            {"hybrid_override_pattern": None, "layers_block_type": ["mamba", ["moe"], 3]},
            "layers_block_type in .* must say",
        ),
        ({"mamba_num_heads": 3}, "mamba_num_heads in .* must be a multiple of n_groups = 2, got 3"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit in .* must be \[0.0, inf\]"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act in .* must be"),
        ({"n_shared_experts": 2}, "n_shared_experts in .* must be"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok in .* must be"),
        ({"mlp_bias": True}, "mlp_bias in .* must be"),
        ({"use_bias": False}, "in_proj.bias"),
        ({"moe_latent_size": 12}, "fc1_latent_proj.weight"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["nemotron_h_moe"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "written by transformers"])
def test_kimi_linear_as_it_is_released(is_released, tmp_path):
    """Fields with other names, a table of the recurrent layers, three convolutions, and a tensor for each expert."""
    directory = write(tmp_path / "model", "kimi_linear")
    model, tensors = load(directory), {}
    for name, values in load_file(directory / "model.safetensors").items():
        if not is_released or "layers.0." not in name:  # transformers writes this name in dense layers, too
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace("forget_gate.", "")
        if name.endswith("conv1d.weight"):
            parts = zip("qkv", np.split(values, 3), strict=True)
            tensors |= {name.replace("conv1d", f"{one}_conv1d"): part.copy() for one, part in parts}
        elif name.endswith(("gate_up_proj", "experts.down_proj")):
            kinds, block = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",), name.rpartition(".")[0]
            for kind, half in zip(kinds, np.split(values, len(kinds), axis=1), strict=True):
                tensors |= {f"{block}.{i}.{kind}.weight": half[i].copy() for i in range(4)}
        else:
            tensors[name] = values
    save_file(tensors, directory / "model.safetensors")
    config = {RENAMED.get(name, name): value for name, value in CONFIGS["kimi_linear"].items()}
    if is_released:
        for name in ("layer_types", "linear_head_dim", "linear_num_heads"):
            del config[name]
        table = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 4}
        config |= {
            "linear_attn_config": table | {"short_conv_kernel_size": 4},
            "mla_use_nope": True,
            "moe_layer_freq": 1,
        }
        config |= {
            "moe_router_activation_func": "sigmoid",
            "use_grouped_topk": True,
            "rope_theta": 10000.0,
            "head_dim": 72,
        }
        config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rope_scaling": None, "q_lora_rank": None}
    (directory / "config.json").write_text(json.dumps(config))
    found = load(directory)
    assert found.apply.config == model.apply.config
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (found, model)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fields_of_kimi_linear_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "kimi_linear")
    for fields, message in (
        ({"layer_types": ["linear_attention"] * 3}, "layer_types in .* must be 3 times"),
        ({"hidden_act": "gelu"}, "hidden_act in .* must be"),
        ({"num_experts": 5}, "num_local_experts in .* must be 5"),
        ({"mla_use_nope": False}, "mla_use_nope in .* must be True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func in .* must be 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads in .* must be 4"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types in .* must be 3 times 'dense' or 'sparse'"),
        ({"linear_attn_config": {"num_heads": 0}}, "linear_attn_config.num_heads in .* must be in"),
        (
            {"linear_attn_config": {"full_attn_layers": [7], "kda_layers": [1]}, "layer_types": None},
            "layer_types in .* must be 3 times",
        ),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["kimi_linear"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)


@pytest.mark.parametrize("ends", [(16, 32), (27, 54)], ids=["released", "written again"])
def test_olmo_hybrid_as_it_is_released(ends, tmp_path):
    """Three convolutions, whose channels transformers writes in thirds, and other names of norms."""
    directory = write(tmp_path / "model", "olmo_hybrid")
    model, tensors = load(directory), {}
    for name, values in load_file(directory / "model.safetensors").items():
        if name.endswith("conv1d.weight"):
            parts = zip("qkv", np.split(values, ends), strict=True)
            tensors |= {name.replace("conv1d", f"{one}_conv1d"): part.copy() for one, part in parts}
            continue
        name = name.replace("input_layernorm", "attention_layer_norm")
        if ends[0] != 16 or "layers.1." not in name:  # the releases have this name in layers that do not attend
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = values
    save_file(tensors, directory / "model.safetensors")
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (load(directory), model)), strict=True):
        np.testing.assert_array_equal(one, other)
    save_file(
        tensors | {"model.layers.0.linear_attn.q_conv1d.weight": np.ones((9, 1, 4), np.float32)},
        directory / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"v_conv1d.weight in .* must have 80 channels, got"):
        load(directory)


def test_fields_of_olmo_hybrid_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "olmo_hybrid")
    for fields, message in (
        ({"layer_types": ["linear_attention"] * 3}, "layer_types in .* must be 3 times"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads in .* must be a multiple of linear_num_key_heads = 2"),
        ({"hidden_act": "gelu"}, "hidden_act in .* must be"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling in .* must be absent or say what"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in .* must be 1.0"),
        ({"sliding_window": 4}, "sliding_window in .* must be absent"),
        ({"linear_conv_kernel_dim": 3}, "conv1d.weight in .* must have shape"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["olmo_hybrid"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)
    turned = load(write(tmp_path / "turned", "olmo_hybrid", CONFIGS["olmo_hybrid"] | {"rope_parameters": None}))
    assert turned.apply.config.rotary_size is None  # a base that is absent is 10000, as in transformers


def test_fields_of_bamba_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "bamba")
    for fields, message in (
        ({"attn_layer_indices": [3]}, r"attn_layer_indices in .* must be integers, .* in \[0, 2\], got \[3\]"),
        ({"attn_layer_indices": [[1]]}, r"attn_layer_indices in .* must be integers, .* got \[\[1\]\]"),
        ({"attn_layer_indices": None}, "attn_layer_indices"),
        ({"hidden_act": "gelu"}, "hidden_act in .* must be 'silu'"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit in .* must be \[0.0, inf\]"),
        ({"mamba_expand": 3}, "mamba.in_proj.weight in .* must have shape"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling.type in .* must be"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["bamba"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)
    (directory / "config.json").write_text(json.dumps(CONFIGS["bamba"] | {"partial_rotary_factor": 0.25}))
    assert load(directory).apply.config.rotary_size == 8  # as transformers takes that field


def test_fields_of_falcon_that_are_refused(tmp_path):
    directory = write(tmp_path / "model", "falcon_h1")
    for fields, message in (
        ({"hidden_act": "gelu"}, "hidden_act in .* must be 'silu'"),
        ({"attention_bias": True}, "attention_bias in .* must be False where attention_in_multiplier is not 1, got"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias in .* must be False where ssm_in_multiplier is not 1, got True"),
        ({"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers in .* must be 5 positive numbers, got \[1.0, 1.0"),
        ({"mlp_multipliers": [1.0, "1"]}, "mlp_multipliers in .* must be 2 positive numbers"),
        ({"key_multiplier": -1.0}, "key_multiplier in .* must be positive"),
        ({"mamba_d_ssm": 50}, "mamba_n_heads in .* must divide the width of Mamba-2 = 50"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit in .* must be \[0.0, inf\]"),
        ({"mamba_rms_norm": False}, "mamba.norm.weight in .* does not belong to"),
    ):
        (directory / "config.json").write_text(json.dumps(CONFIGS["falcon_h1"] | fields))
        with pytest.raises(ValueError, match=message):
            load(directory)


def released(directory, case):
    """A checkpoint of Nemotron as it is released: other names, a tensor for each expert, a drafter, its own fields."""
    write(directory, case)
    tensors = {}
    for name, values in load_file(directory / "model.safetensors").items():
        name = name.replace("model.", "backbone.")
        if ".experts." not in name:
            tensors[name] = values
            continue
        tensors |= {name.replace(".experts.", f".experts.{i}.") + ".weight": one for i, one in enumerate(values)}
    tensors["mtp.layers.0.eh_proj.weight"] = np.ones((4, 8), np.float32)
    save_file(tensors, directory / "model.safetensors")
    fields = {"rms_norm_eps": 1.0, "norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 1.0, "expand": 2}
    fields |= {"time_step_limit": [0.0, float("inf")], "residual_in_fp32": False, "num_logits_to_keep": 1}
    fields |= {"attention_head_dim": 16, "head_dim": None, "sliding_window": None, "mamba_ssm_cache_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(CONFIGS[case] | fields))
    return directory


@pytest.mark.parametrize("case", ["nemotron_h", "nemotron_h_latents"])
def test_nemotron_as_it_is_released(case, tmp_path):
    """And as transformers writes it, with the kinds of layers by their names."""
    model, written = load(released(tmp_path / "released", case)), write(tmp_path / "written", case)
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds = [names[kind] for kind in CONFIGS[case]["hybrid_override_pattern"]]
    config = CONFIGS[case] | {"hybrid_override_pattern": None, "num_hidden_layers": None, "layers_block_type": kinds}
    config |= {"time_step_limit": [0.0, {"__float__": "Infinity"}], "n_group": 1, "topk_group": 1}
    (written / "config.json").write_text(json.dumps(config))
    other = load(written)
    assert model.apply.config == other.apply.config and model.apply.config.norm_eps == 1e-5
    for one, two in zip(*map(jax.tree.leaves, (model.params, other.params)), strict=True):
        np.testing.assert_array_equal(one, two)
    with_feature_layers(model, tuple(range(6)))
    with pytest.raises(ValueError, match=r"feature_layers must be in \[0, 5\], the number of layers"):
        with_feature_layers(model, (6,))


def test_lfm2_as_it_is_released(tmp_path):
    """The first release's names of fields, and a tensor for each matrix of each expert."""
    directory = write(tmp_path / "model", "lfm2")
    first = {name: value for name, value in CONFIGS["lfm2"].items() if name not in ("layer_types", "intermediate_size")}
    first |= {"full_attn_idxs": [1], "block_ff_dim": 48, "block_dim": 32, "conv_dim": 32, "conv_dim_out": 32}
    first |= {"block_norm_eps": 1e-5, "num_heads": 4, "block_use_swiglu": True, "use_pos_enc": True}
    model = load(directory)
    (directory / "config.json").write_text(json.dumps(first | {"conv_use_xavier_init": True}))
    assert load(directory).apply.config == model.apply.config
    whole = first | {"block_multiple_of": 5, "block_ffn_dim_multiplier": None}  # then the width is not rounded up
    (directory / "config.json").write_text(json.dumps(whole))
    assert load(directory).apply.config == model.apply.config
    directory = write(tmp_path / "mixture", "lfm2_moe")
    model, tensors = load(directory), load_file(directory / "model.safetensors")
    for layer in (1, 2):
        experts = f"model.layers.{layer}.feed_forward.experts"
        gate, up = np.split(tensors.pop(f"{experts}.gate_up_proj"), 2, axis=1)
        both = {"w1": gate, "w3": up, "w2": tensors.pop(f"{experts}.down_proj")}
        tensors |= {f"{experts}.{i}.{name}.weight": x[i].copy() for name, x in both.items() for i in range(4)}
    save_file(tensors, directory / "model.safetensors")
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (load(directory), model)), strict=True):
        np.testing.assert_array_equal(one, other)
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    for layers in (load(tmp_path / "codes").params["layers"], load(directory, quantization="int8").params["layers"]):
        coded = {name for name, leaf in layers[2].items() if isinstance(leaf, Quantized)}
        assert coded == {"conv_in", "conv_out", "experts_gate_up", "experts_out"}


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text", "granite_h"])
def test_kinds_of_layers_that_are_no_strings(case, tmp_path):
    config = CONFIGS[case] | {"layer_types": [["conv"], "full_attention", "conv"]}
    with pytest.raises(ValueError, match=r"layer_types in .* must be a list of strings, got \[\['conv'\], "):
        load(write(tmp_path / case, case, config))


def test_fields_of_lfm2_that_are_refused(tmp_path):
    for case, fields, message in (
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types in .* must be 3 times 'full_attention' or 'conv'"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache in .* must be in"),
        ("lfm2", {"conv_dim": 16}, "conv_dim in .* must be 32"),
        ("lfm2", {"conv_bias": True}, "conv.in_proj.bias"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias in .* must be True"),
        ("lfm2_moe", {"num_dense_layers": 4}, "num_dense_layers in .* must be in"),
        (
            "lfm3",
            {"layer_types": ["conv"] * 4},
            "layer_types in .* must be 4 times 'full_attention', 'sliding_attention'",
        ),
        ("lfm3", {"attention_bias": True}, "q_proj.bias"),
        ("lfm3", {"use_sandwich_norm": False}, "post_ffn_norm.weight in .* does not belong to"),
    ):
        config = CONFIGS[case] | fields
        with pytest.raises(ValueError, match=message):
            load(write(tmp_path / f"{case} {next(iter(fields))}", case, config))


def test_codes_of_nemotron(tmp_path):
    """The matrices of each kind of layer, from files with a tensor for each expert."""
    write_quantized(Checkpoint(released(tmp_path / "floats", "nemotron_h_latents")), tmp_path / "codes", "int8")
    layers = load(tmp_path / "codes").params["layers"]
    names = {0: ("mamba_in", "mamba_out"), 2: ("qkv", "attention_out"), 3: ("experts_gate_up", "experts_out")}
    names[1] = "latent_in", "latent_out", "shared_gate_up", "shared_out"
    for layer, own in names.items():
        assert all(isinstance(layers[layer][name], Quantized) for name in own)


def test_nemotron_in_mixed_codes(tmp_path):
    """As ModelOpt writes it: e4m3 for projections of Mamba-2 and attention, NVFP4 for experts, scales of the cache."""
    directory, rng = released(tmp_path / "model", "nemotron_h_latents"), np.random.default_rng(0)
    floats = dict(load_file(directory / "model.safetensors"))
    config, codes = json.loads((directory / "config.json").read_text()), dict(floats)
    for name, matrix in floats.items():
        in_e4m3 = name.endswith(("in_proj.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight"))
        if not in_e4m3 and ".experts." not in name:
            continue
        fabricate = partial(files.fp8, name="weight_scale") if in_e4m3 else partial(files.nvfp4, tool="modelopt")
        arrays, floats[name] = fabricate(rng, *matrix.shape)
        del codes[name]
        codes |= {f"{name.removesuffix('weight')}{key}": np.array(value) for key, value in arrays.items()}
    codes |= {f"backbone.layers.2.mixer.{one}_proj.{one}_scale": np.array(0.5, np.float32) for one in "kv"}
    quantized = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    logits = []
    for tensors, fields in ((codes, {"quantization_config": quantized}), (floats, {})):
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | fields))
        model = load(directory)
        logits.append(np.asarray(call(model, inputs_at(0, 9), None)[0].logits))
        for layer, name in ((0, "mamba_in"), (1, "experts_gate_up"), (1, "experts_out"), (2, "qkv")):
            assert isinstance(model.params["layers"][layer][name], Quantized) == bool(fields)
    assert np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max() <= TOLERANCE
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    save_file(codes, directory / "model.safetensors")
    scales = load(directory, cache_dtype="fp8").params["layers"][2]
    np.testing.assert_array_equal([scales["key_scale"], scales["value_scale"]], np.full((2, 2), 0.5))


def test_chunks_of_the_delta_rule_are_its_recurrence():
    """For lengths around the chunks, with keys that nearly agree, so that the triangular system is far from unit."""
    rng = np.random.default_rng(0)
    heads, key_size, value_size, length = 2, 8, 6, 130
    key = rng.normal(size=(1, 1, heads, key_size)) + 0.3 * rng.normal(size=(1, length, heads, key_size))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    query, value = rng.normal(size=key.shape), rng.normal(size=(1, length, heads, value_size))
    beta, g = rng.uniform(0.5, 1, (1, length, heads)), -rng.uniform(0, 0.2, (1, length, heads))
    state, states, outputs = rng.normal(size=(heads, key_size, value_size)), [], []
    first = state
    for t in range(length):
        state = state * np.exp(g[0, t])[:, None, None]
        new = beta[0, t][:, None] * (value[0, t] - np.einsum("hkv,hk->hv", state, key[0, t]))
        state = state + np.einsum("hk,hv->hkv", key[0, t], new)
        states.append(state)
        outputs.append(np.einsum("hkv,hk->hv", state, query[0, t]))
    run = jax.jit(delta_rule)
    for size in (1, 7, 63, 64, 65, 130):
        given = [jnp.asarray(x[:, :size], jnp.float32) for x in (query, key, value, beta, g)]
        output, last = run(jnp.asarray(first[None], jnp.float32), *given)
        np.testing.assert_allclose(output[0], np.array(outputs[:size]), atol=2e-5)
        np.testing.assert_allclose(last[0], states[size - 1], atol=2e-5)


@pytest.mark.slow
def test_the_state_is_that_of_plain_decoding(hybrid):
    """Also after 200 steps that keep any number of their tokens, beside rows that do not run."""
    testing.assert_model(hybrid)
    testing.assert_model(recurrent())
    run_steps(hybrid, 200)


def run_steps(model, number):
    """Run steps that keep any number of their tokens, and compare each with plain decoding."""
    trial, rng = _Trial.of(model, 64, 1e-4), np.random.default_rng(2)
    for _ in range(number):
        for row in np.flatnonzero(trial.fed > 64 - 2 * WIDTH):
            trial.begin(int(row))
        trial.step("a step", rng.integers(0, WIDTH + 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["olmo_hybrid", "olmo_hybrid_turned", "kimi_linear", "kimi_linear_bias"])
def test_other_delta_nets_keep_the_state_of_plain_decoding(case, tmp_path):
    model = load(write(tmp_path / "model", case))
    testing.assert_model(model)
    run_steps(model, 60)


@pytest.mark.slow
def test_mamba_keeps_the_state_of_plain_decoding(granite):
    testing.assert_model(granite)
    run_steps(granite, 60)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lfm2", "lfm2_moe", "lfm3"])
def test_convolutions_keep_the_inputs_of_plain_decoding(case, tmp_path):
    model = load(write(tmp_path / "model", case))
    testing.assert_model(model)
    run_steps(model, 60)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bamba", "falcon_h1", "falcon_h1_plain"])
def test_other_mamba_keeps_the_state_of_plain_decoding(case, tmp_path):
    model = load(write(tmp_path / "model", case))
    testing.assert_model(model)
    run_steps(model, 60)


@pytest.mark.slow
def test_layers_without_mixers_keep_nothing(tmp_path):
    testing.assert_model(load(write(tmp_path / "model", "nemotron_h_moe")))


@pytest.mark.slow
def test_rows_between_vacant_ones(hybrid, monkeypatch, num_rows=64):
    """A row keeps its state while others begin, keep any number of tokens, or do not run."""
    monkeypatch.setattr(recurrent_rows, "BATCH_SIZE", num_rows)
    trial, rng = _Trial.of(hybrid, 24, 1e-4), np.random.default_rng(3)
    for _ in range(8):
        for row in np.flatnonzero(trial.fed > 24 - 2 * WIDTH):
            trial.begin(int(row))
        trial.step("a step", rng.integers(0, WIDTH + 1, num_rows) * rng.integers(0, 2, num_rows))


def test_steps_of_the_verdict_are_those_that_a_model_takes(monkeypatch):
    """A model with room for two tokens of a step."""
    monkeypatch.setattr("wrong_recurrent.MOST", 2)
    testing.assert_model(replace(recurrent(), max_step=2))
    with pytest.raises(AssertionError, match="a step with 1 drafts, which keeps"):
        testing.assert_model(replace(recurrent("all drafts kept"), max_step=2))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_recurrent_models(mistake):
    with pytest.raises(AssertionError, match=r"call \d+, a (step|chunk)"):
        testing.assert_model(recurrent(mistake))


def decoded(model, proposer, max_length=64):
    prompts = np.random.default_rng(0).integers(2, HYBRID["vocab_size"], (2, 20)).astype(np.int32)
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=25)] * 3)
    given = model, proposer, prompts, np.array([20, 1]), params, jax.random.key(0)
    start = jax.jit(prefill, static_argnames=("max_length", "chunk_size"))
    state = start(*given, max_length=max_length, rows=jnp.array([0, 1, 0]), chunk_size=8)
    return generate(model, proposer, state)


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding(hybrid):
    """With a hybrid in both roles, prompts of one token, and two samples of one prompt.

    One call over the whole rows gives the most likely tokens: plain decoding compiles more.
    """
    drafted = decoded(hybrid, proposers.draft_model(hybrid, 3))
    context = drafted.context
    positions = jnp.broadcast_to(jnp.arange(context.tokens.shape[1], dtype=jnp.int32), context.tokens.shape)
    likely = call(hybrid, ModelInput(context.tokens, positions), None)[0].logits.argmax(axis=2)
    for row, start, own in zip(likely, context.prompt_length, context.tokens, strict=True):
        np.testing.assert_array_equal(own[start : start + 25], row[start - 1 : start + 24])
    assert (context.length - context.prompt_length == 25).all()
    assert drafted.totals.accepted.sum() > 50


def mesh_of(number):
    return Mesh(np.array(jax.devices("cpu")[:number]), ("tensor",))


@pytest.mark.parametrize(
    "case, number",
    [
        pytest.param("qwen3_next", 2, marks=pytest.mark.slow),
        ("qwen3_5_text", 2),
        pytest.param("granite_h", 2, marks=pytest.mark.slow),
        pytest.param("granite_h", 4, marks=pytest.mark.slow),
        pytest.param("granite_h_moe", 2, marks=pytest.mark.slow),
        ("granite_h_moe", 4),
        ("nemotron_h", 2),
        pytest.param("nemotron_h_latents", 2, marks=pytest.mark.slow),
        ("nemotron_h_latents", 4),
        pytest.param("bamba", 2, marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", 2, marks=pytest.mark.slow),
        ("kimi_linear", 2),
        pytest.param("kimi_linear_bias", 4, marks=pytest.mark.slow),
        ("falcon_h1", 2),
        pytest.param("falcon_h1_gated_last", 4, marks=pytest.mark.slow),
        pytest.param("lfm2", 4, marks=pytest.mark.slow),
        ("lfm2_moe", 2),
        pytest.param("lfm3", 2, marks=pytest.mark.slow),
    ],
)
def test_devices_share_the_heads(case, number, goldens, tmp_path):
    """Devices have the logits of one, in prompts, and in steps with and without rejected drafts."""
    model, expected = load(write(tmp_path / case, case), mesh=mesh_of(number)), goldens[case][0]
    own = model.init_memory(1, 1, 8).rows["layers"][0]
    kept, axis, whole = ("inputs", 2, 32) if case.startswith("lfm") else ("state", 1, 4)
    assert own[kept].addressable_shards[0].data.shape[axis] == whole / number
    memory, start = model.init_memory(1, 1, NUM_TOKENS), 0
    for count in (63, 3):
        output, memory = call(model, inputs_at(start, count, size=66), memory)
        assert_close(output.logits[0, :count], expected, start)
        start += count
    assert_steps(model, memory, start, expected)


def of_nemotron(mixer):
    """A model with each kind of Nemotron's layers and this recurrent mixer."""
    experts = Experts(SigmoidTopK(4, 2), Ungated(), shared=Shared("relu2", num_parts=1), latent_size=12)
    layers = ((mixer, None), (None, MLP()), (Attention(), None), (None, experts))
    widths = {"expert_size": 8, "shared_size": 12}
    layers = tuple(LayerConfig(*layer) for layer in layers)
    config = DecoderConfig(HYBRID["vocab_size"], 32, 4, 4, 2, 8, 16, 64, layers=layers, **widths)
    return decoder_model(config, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, init_params(config, 0)))


@pytest.fixture
def on_cpus():
    """A machine with one GPU has several CPU devices, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("groups, number", [(1, 2), (1, 4), (2, 2), (2, 4)])
def test_devices_draw_the_tokens_of_one(groups, number):
    """Greedy tokens with n-grams, where a device has whole groups of Mamba-2, or a part of one."""
    model = of_nemotron(Mamba2(num_key_heads=groups, num_value_heads=4, key_size=8, value_size=6))
    got, expected = (decoded(one, proposers.ngram(3)) for one in (tensor_parallel(model, mesh_of(number)), model))
    np.testing.assert_array_equal(got.context.tokens, expected.context.tokens)
    np.testing.assert_array_equal(got.totals.accepted, expected.totals.accepted)
    assert 0 < expected.totals.accepted.sum() < expected.totals.drafted.sum()


@pytest.mark.parametrize(
    "mixer, number, message",
    [
        (DeltaNet(2, 4, 8, 8), 4, "num_key_heads of gated delta nets must be a multiple of the 4 devices .*, got 2"),
        (Mamba2(2, 6, 8, 8), 4, "num_value_heads of Mamba-2 must be a multiple of the 4 devices .*, got 6"),
        (ShortConv(10), 4, "num_channels of short convolutions must be a multiple of the 4 devices .*, got 10"),
        (Mamba2(3, 12, 8, 8), 2, "num_key_heads of Mamba-2, .*, must be a multiple or a divisor of the 2 .*, got 3"),
    ],
)
def test_heads_that_devices_cannot_share(mixer, number, message):
    with pytest.raises(ValueError, match=message):
        tensor_parallel(of_nemotron(mixer), mesh_of(number))


def assert_close(logits, expected, start):
    """The logits [T, V] of consecutive positions from `start` on are those expected of the whole row."""
    difference = np.abs(logits - expected[start : start + len(logits)]).max()
    assert difference / np.abs(expected).max() <= TOLERANCE


def assert_steps(model, memory, start, expected):
    """Steps that keep some of their tokens have the logits of the whole row."""
    for count in (4, 0, 1, 2, 3, 1):
        inputs = inputs_at(start, 4)
        output, memory = call(model, inputs, memory)
        memory = jax.jit(model.commit)(memory, inputs, jnp.arange(4)[None], jnp.array([count]))
        assert_close(output.logits[0], expected, start)
        start += count


@pytest.mark.parametrize(
    "case", ["granite_h", "nemotron_h_latents", "bamba", "falcon_h1", "olmo_hybrid", "kimi_linear", "lfm2", "lfm3"]
)
def test_steps_of_others(case, goldens, tmp_path):
    """After a prompt, steps with and without rejected drafts have the recorded logits."""
    model = load(write(tmp_path / "model", case))
    _, memory = call(model, inputs_at(0, 65, size=66), model.init_memory(1, 1, NUM_TOKENS))
    assert_steps(model, memory, 65, goldens[case][0])


@pytest.mark.slow
def test_matrices_and_caches_of_few_bits(hybrid):
    """Codes give the logits of the floats for which they stand; states stay float32 beside a cache in float8."""
    few, floats = rounded(hybrid.params, "int8", transposed=False)
    layer = few["layers"][0]
    assert all(isinstance(layer[name], Quantized) for name in ("delta_in", "delta_rates", "delta_out"))
    inputs = inputs_at(0, 9)
    got, expected = (call(replace(hybrid, params=params), inputs, None)[0].logits for params in (few, floats))
    assert np.abs(got - expected).max() / np.abs(expected).max() <= TOLERANCE
    memory = with_cache_dtype(hybrid, "fp8").init_memory(1, 1, 16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(memory.pools)} == {"float8_e4m3fn"}
    assert memory.rows["layers"][0]["state"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_5_text", "olmo_hybrid", "kimi_linear"])
def test_rates_stay_floats(case, tmp_path):
    """When others are rounded: by loading, and in the files that are written."""
    directory = write(tmp_path / "floats", case)
    floats = load(directory).params["layers"][0]
    of_rates = {"delta_rates", "delta_beta", "delta_decay_down", "delta_decay_up"} & floats.keys()
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    for model in (load(directory, quantization="int8"), load(tmp_path / "codes")):
        layer = model.params["layers"][0]
        for name in of_rates:
            np.testing.assert_array_equal(layer[name], floats[name])
        others = {"delta_in", "delta_qkv", "delta_gate_down", "delta_gate_up", "delta_out"} & floats.keys()
        assert all(isinstance(layer[name], Quantized) for name in others)


def test_codes_of_granite(tmp_path):
    """Whose config is read with another width of MLPs where it has no experts."""
    directory = write(tmp_path / "floats", "granite_h", SMALL_GRANITE)
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    layer = load(tmp_path / "codes").params["layers"][0]
    assert all(isinstance(layer[name], Quantized) for name in ("mamba_in", "mamba_out", "gate_up"))


def test_codes_of_falcon(tmp_path):
    """The matrices of both mixers of a layer."""
    directory = write(tmp_path / "floats", "falcon_h1")
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    for model in (load(tmp_path / "codes"), load(directory, quantization="int4")):
        layer = model.params["layers"][0]
        names = {"qkv", "attention_out", "mamba_in", "mamba_out", "gate_up", "mlp_out"}
        assert {name for name, leaf in layer.items() if isinstance(leaf, Quantized)} == names


def test_codes_of_stacks_of_granite_are_refused(tmp_path):
    """No file has them in codes that are read, and none is written."""
    directory = write(tmp_path / "floats", "granite_h_moe")
    with pytest.raises(ValueError, match=r"block_sparse_moe\.input_linear\.weight .* must not be a stack of Granite's"):
        write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    assert isinstance(load(directory, quantization="int8").params["layers"][0]["experts_out"], Quantized)
    tensors = dict(load_file(directory / "model.safetensors"))
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors |= {name: tensors[name].astype(jnp.float8_e4m3fn), f"{name}_scale": np.ones((4, 48, 1), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    codes = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups = {"config_groups": {"group_0": {"targets": ["re:.*input_linear"], "weights": codes}}}
    quantized = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"} | groups}
    (directory / "config.json").write_text(json.dumps(CONFIGS["granite_h_moe"] | quantized))
    with pytest.raises(ValueError, match=r"input_linear.* must be floats, because codes of a stack of experts"):
        load(directory)


def test_devices_that_would_share_rows_are_refused(hybrid):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("batch",))
    with pytest.raises(ValueError, match=r"mesh must have no axis 'batch' for a model that keeps .* got {'batch': 2}"):
        data_parallel(hybrid, mesh)


def test_steps_that_are_refused(hybrid):
    inputs = inputs_at(0, 17)
    with pytest.raises(ValueError, match="at most 16 tokens a row, so num_draft_tokens at most 15, got 17"):
        call(hybrid, inputs, hybrid.init_memory(1, 1, 32))
    mask = jnp.ones((1, 4, 4), bool)
    with pytest.raises(ValueError, match=r"inputs\.mask must be None for a model with recurrent layers"):
        call(hybrid, inputs_at(0, 4)._replace(mask=mask), hybrid.init_memory(1, 1, 32))


@pytest.mark.slow
def test_one_long_sequence_by_a_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_long_sequence.py", "--tokens", "100"])
    main = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "check_long_sequence.py"))["main"]
    monkeypatch.setitem(main.__globals__, "CHUNK", 64)  # two for this sequence
    main()
    *windows, last = capsys.readouterr().out.splitlines()
    assert len(windows) >= 10 and last.startswith("after 1")
