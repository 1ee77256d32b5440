"""GGUF files of dense families, written by the package gguf, against checkpoints of the same floats."""

import numpy as np
import pytest
from families import ALL, LONGROPE, PARTIAL, shapes, write
from families import make_tensor as tensor_of
from test_families import TOLERANCE, difference, whole_logits

from specjax.models import load

gguf = pytest.importorskip("gguf")

SMALL = {"rope_scaling": None, "sliding_window": 5}
# By architecture: the case of families.py, changes of its fields, and the calls of the writer with their values.
CASES = {
    "gemma3": (
        "gemma3",
        SMALL | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 16},
        {"add_sliding_window": 5},
    ),
    "phi3": (
        "phi4_mini",
        {"rope_scaling": LONGROPE | PARTIAL | {"attention_factor": 1.25}, "original_max_position_embeddings": 8},
        {
            "add_rope_dimension_count": 6,
            "add_rope_scaling_orig_ctx_len": 8,
            "add_rope_scaling_attn_factors": 1.25,
            "add_rope_scaling_type": gguf.RopeScalingType.LONGROPE,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}, {}),
    "granite": (
        "granite",
        {},
        {
            "add_embedding_scale": 12.0,
            "add_residual_scale": 0.22,
            "add_attention_scale": 0.5,
            "add_logit_scale": 3.0,
        },
    ),
}


def write_gguf(path, architecture, config, tensors, fields):
    """Write a file with the names of the package."""
    writer = gguf.GGUFWriter(path, architecture)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    common = {
        "add_block_count": config["num_hidden_layers"],
        "add_context_length": config["max_position_embeddings"],
        "add_embedding_length": config["hidden_size"],
        "add_feed_forward_length": config["intermediate_size"],
        "add_head_count": config["num_attention_heads"],
        "add_head_count_kv": config["num_key_value_heads"],
        "add_layer_norm_rms_eps": config["rms_norm_eps"],
        "add_rope_freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        common |= {"add_key_length": config["head_dim"], "add_value_length": config["head_dim"]}
    for name, value in (common | fields).items():
        getattr(writer, name)(value)
    for name, values in tensors.items():
        part = name.split(".")[-2]
        if architecture in ("smollm3", "granite") and part in heads:  # the halves of each head lie between each other
            values = values.reshape(heads[part], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    if architecture == "phi3":
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(PARTIAL[f"{kind}_factor"], np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


@pytest.mark.parametrize("architecture", CASES)
def test_a_file_computes_what_its_floats_do(architecture, tmp_path):
    case, changes, fields = CASES[architecture]
    config = ALL[case] | changes
    floats = load(write(tmp_path / "floats", case, config=config))
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    model = load(write_gguf(tmp_path / "model.gguf", architecture, config, tensors, fields))
    assert difference(whole_logits(model), np.asarray(whole_logits(floats))) <= TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "granite",
            {"add_rope_scaling_finetuned": False},
            "rope.scaling.finetuned in .* must be True or absent",
        ),
        ("phi3", {"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "phi3.rope.scaling.type in .* must be"),
        ("smollm3", {"add_rope_dimension_count": 4}, "smollm3.rope.dimension_count in .* must be 8 or absent, got 4"),
    ],
)
def test_fields_that_are_refused(architecture, fields, message, tmp_path):
    case, changes, usual = CASES[architecture]
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    path = write_gguf(tmp_path / "model.gguf", architecture, ALL[case] | changes, tensors, usual | fields)
    with pytest.raises(ValueError, match=message):
        load(path)
