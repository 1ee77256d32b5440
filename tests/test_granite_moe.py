"""Granite 3 with experts: its logits against transformers, Granite 4 without layers of Mamba-2, and GGUF."""

import json

import numpy as np
import pytest
from families import LENGTHS, tokens
from granite_moe import CONFIGS, tensors
from safetensors.numpy import save_file
from test_families import TOLERANCE, difference, incremental_logits, whole_logits

from specjax.models import load

pytestmark = pytest.mark.usefixtures("float32_products")


def write(directory, fields, stored):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(stored, directory / "model.safetensors")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_those_of_transformers(case, tmp_path):
    """On the checkpoint that transformers writes, with all fields of its config."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import reference

    model = reference.make_model(CONFIGS[case])
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(reference.config(CONFIGS[case]).to_json_string(use_diff=False))
    expected = reference.logits(model, tokens(), LENGTHS)
    ours = load(tmp_path)
    assert difference(whole_logits(ours), expected) <= TOLERANCE
    assert difference(incremental_logits(ours), expected) <= TOLERANCE


def test_an_mlp_beside_experts(tmp_path):
    """The fields of Granite 4 name the same model; without the MLP it is the model whose MLP returns zeros."""
    stored, fields = tensors("granitemoeshared"), CONFIGS["granitemoeshared"]
    hybrid = {"model_type": "granitemoehybrid", "layer_types": 2 * ["attention"], "position_embedding_type": "rope"}
    both, same = write(tmp_path / "both", fields, stored), write(tmp_path / "hybrid", fields | hybrid, stored)
    expected = np.asarray(whole_logits(load(same)))
    np.testing.assert_array_equal(whole_logits(load(both)), expected)
    zeros = {name: 0 * x if "shared_mlp.output" in name else x for name, x in stored.items()}
    expected = np.asarray(whole_logits(load(write(tmp_path / "zeros", fields, zeros))))
    without = load(write(tmp_path / "without", CONFIGS["granitemoe"], tensors("granitemoe")))
    assert difference(whole_logits(without), expected) <= 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok in .* must be in \[1, 6\], got 7"),
        ({"shared_intermediate_size": 24}, "tensor model.layers.0.shared_mlp.gate_proj.weight is missing"),
    ],
)
def test_fields_that_are_wrong(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "model", CONFIGS["granitemoe"] | fields, tensors("granitemoe")))


@pytest.mark.parametrize("case", CONFIGS)
def test_a_gguf_file_computes_what_its_floats_do(case, tmp_path):
    """Converters part the matrices of gate and up, and put the halves of each head between each other."""
    gguf = pytest.importorskip("gguf")
    from test_gguf_mamba import converted

    stored, fields = tensors(case), CONFIGS[case]
    floats = load(write(tmp_path / "floats", fields, stored))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "granitemoe")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GRANITE_MOE, 2)
    known = {
        "add_block_count": 2,
        "add_context_length": 64,
        "add_embedding_length": 32,
        "add_feed_forward_length": 20,
        "add_head_count": 4,
        "add_head_count_kv": 2,
        "add_layer_norm_rms_eps": 1e-5,
        "add_rope_freq_base": 500.0,
        "add_embedding_scale": 12.0,
        "add_residual_scale": 0.22,
        "add_attention_scale": 0.5,
        "add_logit_scale": 3.0,
        "add_expert_count": 6,
        "add_expert_used_count": 3,
    }
    if case == "granitemoeshared":
        known["add_expert_shared_feed_forward_length"] = 24
    for name, value in known.items():
        getattr(writer, name)(value)
    for name, values in stored.items():
        for part, one in converted(name, values, 1, True, True).items():
            of_file = names.get_name(part, try_suffixes=(".weight",))
            if of_file is None:
                _, _, layer, _, kind, _ = part.split(".")
                of_file = f"blk.{layer}.ffn_{kind.removesuffix('_proj')}_shexp.weight"
            writer.add_tensor(of_file, np.ascontiguousarray(one))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    assert difference(whole_logits(load(tmp_path / "model.gguf")), np.asarray(whole_logits(floats))) <= TOLERANCE
