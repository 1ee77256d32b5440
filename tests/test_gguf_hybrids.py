"""GGUF files of Qwen's hybrids, changed as converters do it, against checkpoints of the same floats."""

import json

import hybrids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import make_tensor
from safetensors.numpy import save_file
from test_families import TOLERANCE

from specjax import proposers
from specjax.models import Checkpoint, load
from specjax.models.quantized import dequantize, is_quantized
from specjax.types import ModelInput

gguf = pytest.importorskip("gguf")

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 8, 32
SIZES = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_value_head_dim": VALUE,
    "rms_norm_eps": 1e-6,
}
CASES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
FIELDS = {
    "add_block_count": 4,
    "add_context_length": 256,
    "add_embedding_length": 32,
    "add_head_count": 4,
    "add_head_count_kv": 2,
    "add_key_length": 16,
    "add_value_length": 16,
    "add_layer_norm_rms_eps": 1e-6,
    "add_rope_freq_base": 500.0,
    "add_rope_dimension_count": 4,
    "add_ssm_conv_kernel": 4,
    "add_ssm_state_size": KEY,
    "add_ssm_group_count": KEY_HEADS,
    "add_ssm_time_step_rank": HEADS,
    "add_ssm_inner_size": HEADS * VALUE,
    "add_full_attention_interval": 2,
}
OF_EXPERTS = {
    "add_expert_count": 4,
    "add_expert_used_count": 2,
    "add_expert_feed_forward_length": 24,
    "add_expert_shared_feed_forward_length": 20,
}


def fields_of(architecture):
    return FIELDS | (OF_EXPERTS if architecture != "qwen35" else {"add_feed_forward_length": 48})


def config_of(architecture):
    return {k: v for k, v in hybrids.CONFIGS[CASES[architecture]].items() if k != "layer_types"} | SIZES


def shapes_of(architecture):
    """Shapes of the tensors of four layers, every second of which attends."""
    found, known = {}, hybrids.shapes(CASES[architecture])
    for name, shape in known.items():
        if not name.startswith("model.layers."):
            found[name] = shape
            continue
        _, _, layer, part = name.split(".", 3)
        found |= {f"model.layers.{i}.{part}": shape for i in (int(layer), int(layer) + 2) if int(layer) < 2}
    keys, values, hidden = 2 * KEY_HEADS * KEY, HEADS * VALUE, 32
    changed = {
        "in_proj_qkvz.weight": (keys + 2 * values, hidden),
        "in_proj_qkv.weight": (keys + values, hidden),
        "in_proj_z.weight": (values, hidden),
        "conv1d.weight": (keys + values, 1, 4),
        "norm.weight": (VALUE,),
        "out_proj.weight": (hidden, values),
    }
    return {n: changed.get(n.partition(".linear_attn.")[2], shape) for n, shape in found.items()}


def tensors_of(architecture):
    return {name: make_tensor(name, shape) for name, shape in shapes_of(architecture).items()}


def tiled(values, width, axis=0):
    """Value heads with the first of each key head side by side, then the second ones, as converters do."""
    values = np.moveaxis(values, axis, 0)
    heads = values.reshape(KEY_HEADS, HEADS // KEY_HEADS, width, *values.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(values.shape), 0, axis)


def converted(architecture, name, values):
    """A tensor of transformers as tensors of the file, by names of transformers that the package maps."""
    part = name.rpartition("linear_attn.")[2]
    keys = 2 * KEY_HEADS * KEY
    if architecture != "qwen3next" and "linear_attn." in name:
        if part.startswith(("in_proj_qkv", "conv1d")):
            values = np.concatenate([values[:keys], tiled(values[keys:], VALUE)])
        elif part.startswith("in_proj_z"):
            values = tiled(values, VALUE)
        elif part.startswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
            values = tiled(values, 1)
        elif part.startswith("out_proj"):
            values = tiled(values, VALUE, axis=1)
    if part == "A_log":
        return {name: -np.exp(values)}
    if part == "dt_bias":
        return {name.replace("dt_bias", "dt_proj.bias"): values}
    if part.startswith("conv1d"):
        return {name: values[:, 0]}
    if part.startswith("in_proj_qkvz"):
        sizes = KEY, KEY, HEADS // KEY_HEADS * VALUE, HEADS // KEY_HEADS * VALUE
        parts = np.split(values.reshape(KEY_HEADS, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
        *qkv, z = (one.reshape(-1, values.shape[1]) for one in parts)
        start = name.removesuffix("in_proj_qkvz.weight")
        return {f"{start}in_proj_qkv.weight": np.concatenate(qkv), f"{start}in_proj_z.weight": z}
    if name.endswith("experts.gate_up_proj") and architecture == "qwen35moe":
        return {f"{name}.weight": values}
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        start = name.removesuffix("gate_up_proj")
        return {f"{start}gate_proj.weight": gate, f"{start}up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": values}
    if name.endswith("norm.weight") and part != "norm.weight":
        return {name: values + 1}
    return {name: values}


def write_gguf(path, architecture, tensors, fields, mtp=None, **kinds):
    writer = gguf.GGUFWriter(path, architecture)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, 5)
    for name, value in fields.items():
        getattr(writer, name)(value)

    def add(name, values):
        kind = next((kind for part, kind in kinds.items() if f"{part}.weight" in name), None)
        values = np.ascontiguousarray(values)
        writer.add_tensor(name, values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)

    for name, values in tensors.items():
        for of_name, part in converted(architecture, name, values).items():
            if ".in_proj_ba." in of_name:  # the package knows it in newer releases alone
                add(f"blk.{of_name.split('.')[2]}.ssm_ba.weight", part)
            else:
                add(names.get_name(of_name, try_suffixes=(".weight", ".bias")), part)
    for name, values in (mtp or {}).items():
        add(name, values)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


def write_floats(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(model):
    inputs = ModelInput(jnp.asarray(hybrids.tokens()), jnp.arange(hybrids.NUM_TOKENS)[None])
    return jax.jit(model.apply)(model.params, inputs, None)[0].logits


@pytest.mark.parametrize("architecture", CASES)
def test_a_file_computes_what_its_floats_do(architecture, tmp_path):
    config, tensors = config_of(architecture), tensors_of(architecture)
    floats = load(write_floats(tmp_path / "floats", config, tensors))
    model = load(write_gguf(tmp_path / "model.gguf", architecture, tensors, fields_of(architecture)))
    expected = np.asarray(logits(floats))
    assert np.abs(logits(model) - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_inputs_of_codes_are_put_in_order(tmp_path):
    """The last projection of a delta net, whose inputs are the value heads, stays in codes."""
    tensors, kind = tensors_of("qwen35"), gguf.GGMLQuantizationType.Q4_0
    path = write_gguf(tmp_path / "model.gguf", "qwen35", tensors, fields_of("qwen35"), ssm_out=kind, attn_gate=kind)
    out = load(path).params["layers"][0]["delta_out"]
    assert is_quantized(out)
    stored = tensors["model.layers.0.linear_attn.out_proj.weight"]
    # A head has one group of 32 inputs, so that its codes are the same wherever it stands.
    expected = gguf.dequantize(gguf.quantize(np.ascontiguousarray(stored), kind), kind)
    np.testing.assert_array_equal(dequantize(out), expected)


def test_the_layer_for_multi_token_prediction(tmp_path):
    """It follows the others in the file, and has the names of the drafter."""
    tensors = tensors_of("qwen35")
    layer = {name: x for name, x in tensors.items() if name.startswith("model.layers.3.")}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, 5)
    mtp, expected = {}, {}
    for name, values in layer.items():
        of_file = names.get_name(name, try_suffixes=(".weight", ".bias")).replace("blk.3.", "blk.4.")
        mtp[of_file] = values + 1 if name.endswith("norm.weight") else values
        expected[name.replace("model.layers.3.", "mtp.layers.0.")] = values
    for name, of_file in MTP.items():
        values = make_tensor(name, (32, 64) if name == "fc" else (32,))
        mtp[f"blk.4.nextn.{of_file}.weight"] = values if name == "fc" else values + 1
        expected[f"mtp.{name}.weight"] = values
    fields = fields_of("qwen35") | {"add_block_count": 5, "add_nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "model.gguf", "qwen35", tensors, fields, mtp)
    config = config_of("qwen35") | {"mtp_num_hidden_layers": 1}
    floats = write_floats(tmp_path / "floats", config, tensors | expected)
    assert Checkpoint(path).config.get("num_hidden_layers", int) == 4
    found = [proposers.load(one, load(one), num_draft_tokens=2).params for one in (path, floats)]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"add_ssm_time_step_rank": 3},
            "ssm.time_step_rank in .* must be a multiple of 2 in .*, got 3",
        ),
        (
            {"add_ssm_inner_size": 126},
            "ssm.inner_size in .* must be a multiple of 4 in .*, got 126",
        ),
        (
            {"add_ssm_group_count": 2**31},
            "ssm.group_count in .* must be a multiple of 1 in .*, got 2147483648",
        ),
        ({"add_ssm_state_size": 12}, r"in_proj_qkv.weight in .* must have shape|blk.0.attn_qkv.weight"),
    ],
)
def test_fields_that_are_refused(fields, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "qwen35", tensors_of("qwen35"), fields_of("qwen35") | fields)
    with pytest.raises(ValueError, match=message):
        load(path)
