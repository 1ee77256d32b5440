"""GGUF files of hybrids of Mamba-2 and of LFM2, as converters change them, against checkpoints of the same floats."""

import hybrids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import make_tensor
from test_families import TOLERANCE
from test_gguf_hybrids import logits, write_floats

from specjax import SamplingParams, generate, prefill, proposers, sampling
from specjax.models import Checkpoint, load
from specjax.models.quantized import is_quantized

gguf = pytest.importorskip("gguf")

OF_MAMBA = {
    "add_context_length": 256,
    "add_embedding_length": 32,
    "add_head_count": 4,
    "add_layer_norm_rms_eps": 1e-5,
    "add_ssm_conv_kernel": 4,
    "add_ssm_state_size": 8,
    "add_ssm_time_step_rank": 4,
    "add_rope_scaling_finetuned": False,
}
OF_GRANITE = OF_MAMBA | {
    "add_block_count": 3,
    "add_head_count_kv": [0, 2, 0],
    "add_feed_forward_length": 24,
    "add_expert_shared_feed_forward_length": 20,
    "add_rope_dimension_count": 8,
    "add_ssm_inner_size": 64,
    "add_embedding_scale": 3.0,
    "add_attention_scale": 0.3,
    "add_residual_scale": 0.5,
    "add_logit_scale": 2.0,
}
OF_NEMOTRON = OF_MAMBA | {
    "add_block_count": 5,
    "add_key_length": 16,
    "add_value_length": 16,
    "add_rope_dimension_count": 8,  # the hidden size by the number of heads
    "add_ssm_group_count": 2,
    "add_ssm_inner_size": 48,
}
OF_EXPERTS = {"add_expert_count": 4, "add_expert_used_count": 2}
OF_NEMOTRON_3 = OF_NEMOTRON | {
    **OF_EXPERTS,
    "add_head_count_kv": [0, 0, 2, 0, 0],
    "add_feed_forward_length": [0, 24, 0, 24, 0],
    "add_expert_feed_forward_length": 24,
    "add_expert_shared_feed_forward_length": 20,
    "add_expert_shared_count": 1,
    "add_expert_weights_norm": True,
    "add_expert_weights_scale": 2.5,
    "add_expert_group_count": 1,
}
OF_FALCON = OF_MAMBA | {
    "add_block_count": 2,
    "add_feed_forward_length": 48,
    "add_head_count_kv": 2,
    "add_rope_freq_base": hybrids.FALCON["rope_theta"],
    "add_ssm_inner_size": 64,
    "add_ssm_group_count": 1,
    "add_key_length": 8,
    "add_value_length": 8,
}
OF_LFM2 = {
    "add_block_count": 3,
    "add_context_length": 256,
    "add_embedding_length": 32,
    "add_feed_forward_length": 32,
    "add_head_count": 4,
    "add_head_count_kv": [0, 2, 0],
    "add_layer_norm_rms_eps": 1e-5,
    "add_rope_freq_base": hybrids.LFM2["rope_theta"],
    "add_shortconv_l_cache": 4,
}
OF_LFM2_MOE = {
    "add_feed_forward_length": 48,
    "add_shortconv_l_cache": 3,
    "add_leading_dense_block_count": 1,
    "add_expert_feed_forward_length": 24,
    "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
    "add_expert_weights_scale": 2.5,
}
# Converters multiply the tensors of Falcon-H1 by its factors.
NEUTRAL = {name: 1.0 for name in hybrids.CONFIGS["falcon_h1"] if name.endswith("_multiplier")}
NEUTRAL |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
CASES = {  # the case of the floats, changes of its config, the architecture, and the fields of the file
    "granite": ("granite_h", {}, "granitehybrid", OF_GRANITE | {"add_ssm_group_count": 2, "add_expert_count": 0}),
    "granite with experts": (
        "granite_h_moe",
        {},
        "granitehybrid",
        OF_GRANITE | OF_EXPERTS | {"add_ssm_group_count": 1},
    ),
    "nemotron": (
        "nemotron_h",
        {},
        "nemotron_h",
        OF_NEMOTRON | {"add_head_count_kv": [0, 2, 0, 0, 0], "add_feed_forward_length": [0, 0, 48, 0, 48]},
    ),
    "nemotron with experts": ("nemotron_h_moe", {"mlp_hidden_act": "relu2"}, "nemotron_h_moe", OF_NEMOTRON_3),
    "nemotron with latents": (
        "nemotron_h_latents",
        {},
        "nemotron_h_moe",
        OF_NEMOTRON_3 | {"add_moe_latent_size": 12},
    ),
    "falcon": ("falcon_h1_plain", {}, "falcon-h1", OF_FALCON),
    "falcon with norms": (
        "falcon_h1",
        NEUTRAL,
        "falcon-h1",
        OF_FALCON | {"add_ssm_inner_size": 48, "add_ssm_group_count": 2},
    ),
    "lfm2": ("lfm2", {}, "lfm2", OF_LFM2),
    "lfm2 with experts": ("lfm2_moe", {"conv_bias": False}, "lfm2moe", OF_LFM2 | OF_EXPERTS | OF_LFM2_MOE),
}


def tensors_of(case):
    """Tensors by the names of released files."""
    found = {name: make_tensor(name, shape) for name, shape in hybrids.shapes(case).items()}
    for own, in_files in hybrids.IN_FILES.items():
        found = {name.replace(own, in_files): values for name, values in found.items()}
    return {name: values for name, values in found.items() if ".conv." not in name or not name.endswith(".bias")}


def converted(name, values, groups, has_experts, has_halves_between):
    """A tensor of transformers as tensors of the file, by names of transformers that the package maps."""
    if name.endswith(".conv.conv.weight"):
        return {name: values[:, 0]}
    if ".feed_forward.experts." in name:
        block, _, part = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        halves = np.split(values, len(kinds), -2)
        return {f"{block}.{kind}.weight": half for kind, half in zip(kinds, halves, strict=True)}
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": values}
    layer, _, part = name.rpartition(".mamba." if ".mamba." in name else ".mixer.")
    heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(name.rpartition("_attn.")[2].rpartition("mixer.")[2])
    if heads and has_halves_between:
        return {name: values.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(values.shape)}
    if part == "A_log":
        return {name: -np.exp(values)[:, None]}
    if part == "D":
        return {name: values[:, None]}
    if part == "dt_bias":
        return {name.replace("dt_bias", "dt_proj.bias"): values}
    if part == "conv1d.weight":
        return {name: values[:, 0]}
    if layer and part == "norm.weight":
        return {name: values.reshape(groups, -1)}
    if "input_linear" in name:
        kinds = ("w1", "w3") if "moe" in name else ("gate_proj", "up_proj")
        block = name.removesuffix("input_linear.weight") + ("experts." if "moe" in name else "")
        if "moe" not in name and not has_experts:  # an MLP alone has the names of others
            block = block.replace("shared_mlp", "mlp")
        return {f"{block}{kind}.weight": half for kind, half in zip(kinds, np.split(values, 2, -2), strict=True)}
    if name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): values}
    if part.startswith("experts."):
        return {name.replace("mixer", "mlp") + ".weight": values}
    if part.startswith("gate.e_score"):
        return {name.replace("correction_bias", "correction.bias"): values}
    return {name: values}


def write_gguf(path, case, fields=(), kind=None, extra=()):
    of_floats, _, architecture, own = CASES[case]
    writer, known = gguf.GGUFWriter(path, architecture), own | dict(fields)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, 6)
    for name, value in known.items():
        getattr(writer, name)(value)
    given = own.get("add_ssm_group_count", 0), bool(own.get("add_expert_count"))
    given += (architecture.startswith(("granite", "nemotron")),)
    for name, values in tensors_of(of_floats).items():
        for of_name, part in converted(name, values, *given).items():
            both = (of_name.replace("model.", start, 1) for start in ("model.", "backbone."))
            found = [names.get_name(one, try_suffixes=(".weight", ".bias")) for one in both]
            of_file = found[0] or found[1]
            if of_file is None:
                assert ".shared_mlp." in of_name
                _, _, layer, _, part_of_mlp, _ = of_name.split(".")
                of_file = f"blk.{layer}.ffn_{part_of_mlp.removesuffix('_proj')}_shexp.weight"
            is_coded = kind is not None and part.ndim > 1 and part.shape[-1] % 32 == 0 and "ssm_norm" not in of_file
            part = np.ascontiguousarray(part)
            writer.add_tensor(
                of_file, gguf.quantize(part, kind) if is_coded else part, raw_dtype=kind if is_coded else None
            )
    for name, values in dict(extra).items():
        writer.add_tensor(name, values)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_its_floats_do(case, tmp_path):
    of_floats, changes, *_ = CASES[case]
    floats = load(write_floats(tmp_path / "floats", hybrids.CONFIGS[of_floats] | changes, tensors_of(of_floats)))
    model = load(write_gguf(tmp_path / "model.gguf", case))
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (model, floats)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    expected = np.asarray(logits(floats))
    assert np.abs(logits(model) - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("case", ["granite", "nemotron with experts"])
def test_codes_stay(case, tmp_path):
    """Also of Mamba-2 and of experts, and drafts change no token."""
    model = load(write_gguf(tmp_path / "model.gguf", case, kind=gguf.GGMLQuantizationType.Q8_0))
    layer = model.params["layers"][0]
    assert is_quantized(layer["mamba_in"])
    of_ffn = model.params["layers"][1]
    assert is_quantized(of_ffn["experts_gate_up" if "experts" in case else "gate_up"])
    given = jnp.asarray(hybrids.tokens()[:, :9]), jnp.array([9])
    texts = []
    for proposer in (proposers.none(), proposers.ngram(3)):
        rows = sampling.batch([SamplingParams(temperature=0, max_tokens=24)])
        state = jax.jit(prefill, static_argnames="max_length")(
            model, proposer, *given, rows, jax.random.key(0), max_length=48
        )
        texts.append(np.asarray(generate(model, proposer, state).context.tokens))
    np.testing.assert_array_equal(*texts)


def test_the_drafter_in_a_file_is_left_out(tmp_path):
    """Its layer follows the others, attends and has experts."""
    case = "nemotron with experts"
    fields = {"add_block_count": 6, "add_nextn_predict_layers": 1, "add_head_count_kv": [0, 0, 2, 0, 0, 2]}
    fields |= {"add_feed_forward_length": [0, 24, 0, 24, 0, 24]}
    extra = {"blk.5.nextn.enorm.weight": np.ones(32, np.float32), "blk.5.attn_norm.weight": np.ones(32, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", case, fields, extra=extra)
    assert Checkpoint(path).config.get("num_hidden_layers", int) == 5
    assert load(path).apply.config == load(write_gguf(tmp_path / "other.gguf", case)).apply.config


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("granite", {"add_ssm_inner_size": 60}, "ssm.inner_size in .* must be a multiple of embedding_length = 32"),
        ("granite", {"add_ssm_group_count": 3}, "ssm.time_step_rank in .* must be a multiple of 3 in .*, got 4"),
        ("granite", {"add_head_count_kv": [0, 0, 0]}, "attention.head_count_kv in .* must be at least 1, got 0"),
        ("granite", {"add_head_count_kv": [0, 2, 1]}, "head_count_kv and feed_forward_length .* the same"),
        ("nemotron", {"add_feed_forward_length": [0, 48]}, "feed_forward_length in .* an integer, or 5 of them"),
        ("nemotron", {"add_feed_forward_length": [0, 0, 48, 0, 0]}, "model.layers.4.mixer"),
    ],
)
def test_fields_that_are_refused(case, fields, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", case, fields)
    with pytest.raises(ValueError, match=message):
        load(path)
