"""Dense families: text parts of checkpoints that also take images, and fields that are refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from families import ALL, YARN, write
from safetensors.numpy import load_file, save_file

from specjax.models import Checkpoint, load
from specjax.models.quantize_files import write_quantized
from specjax.models.quantized import Quantized, dequantize
from specjax.models.rope import NO_ROPE, YarnScaling

PREFIXES = {  # of the language model in files of transformers before 4.52 and after
    "old": lambda name: f"language_model.{name}",
    "new": lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
}
CASES = {
    "gemma3": "gemma3",
    "gemma4_unified": "gemma4_unified",
    "ministral3": "mistral3",
    "mistral": "mistral3",
    "mistral4": "mistral3",
    "deepseek_v3": "kimi_k25",
    "qwen2_window": "qwen2_5_vl",
    "qwen3": "qwen3_vl",
    "qwen3_moe_normed": "qwen3_vl_moe",
}  # model_type, by the case of the text part
TYPES = ["sliding_attention", "full_attention"]
BETA = {"rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("case", CASES)
def test_images_are_left_out(case, prefix, tmp_path):
    alone = load(write(tmp_path / "alone", case))
    config = {"model_type": CASES[case], "text_config": ALL[case], "vision_config": {"depth": 2}}
    model = load(write(tmp_path / prefix, case, config=config, renamed=PREFIXES[prefix]))
    assert model.apply.config == alone.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, alone.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gemma3", {"sliding_window_pattern": None, "_sliding_window_pattern": 3, "layer_types": TYPES}),  # as 270M
        ("gemma4", {"global_head_dim": None, "per_layer_config": {"1": {"head_dim": 24, "num_key_value_heads": 1}}}),
        ("qwen2", {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
        ("qwen3", {"model_type": "qwen3_vl", "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
    ],
)
def test_other_names_of_fields(case, change, tmp_path):
    directory = write(tmp_path / "model", case)
    expected = load(directory).apply.config
    (directory / "config.json").write_text(json.dumps(ALL[case] | change))
    assert load(directory).apply.config == expected


@pytest.fixture
def qwen3_vl_moe(tmp_path):
    """A checkpoint as it is released: transformers may write the outputs of a stack first, as other tests have them."""
    config = {"model_type": "qwen3_vl_moe", "text_config": ALL["qwen3_moe_normed"] | {"norm_topk_prob": None}}
    released = write(tmp_path / "released", "qwen3_moe_normed", config=config)
    stored = load_file(released / "model.safetensors")
    turned = {name: np.ascontiguousarray(x.transpose(0, 2, 1)) for name, x in stored.items() if ".experts." in name}
    save_file(stored | turned | {"visual.patch_embed.bias": np.ones(4)}, released / "model.safetensors")
    return released


def test_experts_of_qwen3_vl_have_the_inputs_of_a_matrix_first(qwen3_vl_moe, tmp_path):
    expected, model = load(write(tmp_path / "alone", "qwen3_moe_normed")), load(qwen3_vl_moe)
    assert model.apply.config == expected.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_codes_of_experts_of_qwen3_vl(qwen3_vl_moe, tmp_path):
    write_quantized(Checkpoint(qwen3_vl_moe), tmp_path / "out", "int8")
    rounded = load(tmp_path / "out").params, load(qwen3_vl_moe, quantization="int8").params
    for one, other in zip(*map(jax.tree.leaves, rounded), strict=True):
        np.testing.assert_array_equal(one, other)


def test_old_files_of_gpt2(tmp_path):
    """Their names lack the prefix, and they hold the causal masks of layers."""
    expected = load(write(tmp_path / "new", "gpt2"))
    old = write(tmp_path / "old", "gpt2", renamed=lambda name: name.removeprefix("transformer."))
    masks = {f"h.{i}.attn.{name}": np.ones((1, 1, 64, 64), bool) for i in range(2) for name in ("bias", "masked_bias")}
    save_file(load_file(old / "model.safetensors") | masks, old / "model.safetensors")
    for one, other in zip(*map(jax.tree.leaves, (load(old).params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_old_files_of_gpt_neox(tmp_path):
    """They call the head an embedding, and hold the causal masks of layers and frequencies."""
    expected = load(write(tmp_path / "new", "gpt_neox"))
    old = write(tmp_path / "old", "gpt_neox", renamed=lambda name: name.replace("lm_head", "embed_out"))
    names = {"bias": np.ones((1, 1, 64, 64), bool), "masked_bias": np.float32(-1e9), "rotary_emb.inv_freq": np.ones(2)}
    others = {f"gpt_neox.layers.{i}.attention.{name}": np.asarray(x) for i in range(2) for name, x in names.items()}
    save_file(load_file(old / "model.safetensors") | others, old / "model.safetensors")
    for one, other in zip(*map(jax.tree.leaves, (load(old).params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_key_head_of_falcon(tmp_path):
    """Files with one may say another number, which new releases alone have."""
    config = ALL["falcon_multi_query"] | {"num_kv_heads": 4}
    assert load(write(tmp_path / "model", "falcon_multi_query", config=config)).apply.config.num_kv_heads == 1


def test_matrices_of_gpt2_that_are_rounded(tmp_path):
    """A matrix of codes has its outputs first, whatever the files have first."""
    directory = write(tmp_path / "model", "gpt2")
    floats, codes = (load(directory, quantization=name).params["layers"][0] for name in (None, "int8"))
    for name in ("qkv", "attention_out", "mlp_in", "mlp_out"):
        weight = floats[name]["weight"]
        np.testing.assert_allclose(dequantize(codes[name]["weight"], weight.dtype), weight.T, atol=0.01)
    codes = load(directory, quantization="int4").params["layers"][0]
    assert (codes["qkv"]["weight"].bits, codes["mlp_in"]["weight"].bits) == (8, 4)


def test_codes_of_gpt2_are_refused(tmp_path):
    config = ALL["gpt2"] | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    directory = write(tmp_path / "model", "gpt2", config=config)
    stored, name = load_file(directory / "model.safetensors"), "transformer.h.1.attn.c_proj.weight"
    save_file(stored | {name: np.ones((32, 32), np.int8)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.h.1.attn.c_proj.weight must be floats, because codes of a matrix"):
        load(directory)


def with_constants(directory, **constants):
    """Add constants of an activation of Apertus to a file, in 16 bits, each a tensor without axes."""
    tensors = {f"model.layers.1.mlp.act_fn.{name}": np.asarray(x, ml_dtypes.bfloat16) for name, x in constants.items()}
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")
    return directory


def test_files_of_apertus_may_have_constants(tmp_path):
    expected = load(write(tmp_path / "without", "apertus"))
    model = load(with_constants(write(tmp_path / "with", "apertus"), beta=0.5, eps=-1e-6))
    for one, other in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("constants", "expected"), [({"beta": 0.25}, 0.5), ({"eps": -1e-5}, -1e-6)])
def test_other_constants_of_apertus_are_refused(constants, expected, tmp_path):
    (name,) = constants
    with pytest.raises(ValueError, match=f"layers.1.mlp.act_fn.{name} must be {expected}, the only value"):
        load(with_constants(write(tmp_path / "model", "apertus"), **constants))


@pytest.mark.parametrize(("case", "factor"), [("glm4", 1.0), ("glm4_moe", 0.5)])
def test_text_parts_of_glm_have_biases(case, factor, tmp_path):
    """Their files do not say it, and may leave out how much of a head turns."""
    text = {name: x for name, x in ALL[case].items() if name not in ("attention_bias", "partial_rotary_factor")}
    config = {"model_type": case.replace("4", "4v"), "text_config": text | {"rope_scaling": {"mrope_section": [1]}}}
    alone = text | {"attention_bias": True, "partial_rotary_factor": factor}
    directories = {
        write(tmp_path / "alone", case, config=alone): {},
        write(tmp_path / "both", case, config=config, renamed=PREFIXES["new"]): {"model.visual.norm": np.ones(4)},
    }
    for directory, others in directories.items():
        stored = load_file(directory / "model.safetensors")
        inputs = [name for name in stored if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
        biases = {name.replace("weight", "bias"): stored[name][:, 0].copy() for name in inputs}
        save_file(stored | biases | others, directory / "model.safetensors")
    expected, model = map(load, directories)
    assert model.apply.config == expected.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", ["gemma3", "mistral"])
def test_tensors_decide_whether_heads_are_tied(case, tmp_path):
    """Where the fields beside and in the text part differ, as files of transformers 5 may have them."""
    text = ALL[case] | {"tie_word_embeddings": False}
    config = {"model_type": CASES[case], "tie_word_embeddings": True, "text_config": text}
    model = load(write(tmp_path / "model", case, config=config))
    assert ("head" in model.params) == (not ALL[case]["tie_word_embeddings"])


def test_a_text_part_without_its_defaults(tmp_path):
    """The files of Gemma 3 with images lack the fields with the usual values."""
    directory = write(tmp_path / "model", "gemma3")
    kept = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": kept | {"model_type": "gemma3_text"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"embed_tokens.weight in .* must have shape \(262208, 2560\), got \(64, 32\)"):
        load(directory)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "gemma4_small",
            {"vocab_size_per_layer_input": 65},
            "vocab_size_per_layer_input in .* must be vocab_size = 64",
        ),
        (
            "gemma4_small",
            {"num_kv_shared_layers": 4},
            "must leave keys and values to a layer of the type full",
        ),
        ("gemma4_small", {"num_kv_shared_layers": 7}, r"num_kv_shared_layers in .* must be in \[0, 6\], got 7"),
        (
            "gemma4_small",
            {"hidden_size_per_layer_input": 5},
            r"input_gate.weight in .* must have shape \(5, 32\)",
        ),
        ("gemma4", {"per_layer_config": {"0": {}}}, "per_layer_config in .* must have the same fields for each layer"),
        ("gemma4", {"per_layer_config": {"1": {"rms_norm_eps": 1.0}}}, "per_layer_config.1.rms_norm_eps in .* must be"),
        ("phi3", {"per_layer_config": {"1": {"head_dim": 24}}}, "per_layer_config in .* must be absent"),
        ("gemma4", {"enable_moe_block": True}, "must have the field num_experts"),
        (
            "granite4",
            {"layer_types": ["mamba", "mamba"]},
            "layer_types in .* must be 2 times 'mamba' or 'attention', the",
        ),
        (
            "granite4",
            {"layer_types": ["mamba", "attention"], "mamba_n_heads": 5},
            "mamba_n_heads in .* must divide .* 64",
        ),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type in .* must be 'rope' or 'nope'"),
        ("granite_swa", {"layer_rope_theta": [500.0]}, "layer_rope_theta in .* must be 4 numbers, each 0 or positive"),
        ("granite_swa", {"layer_rope_theta": [0, 1, True, 2]}, "layer_rope_theta in .* must be 4 numbers, each 0 or"),
        ("granite_swa", {"layer_rope_theta": [0, 1, -1.0, 2]}, "layer_rope_theta in .* must be 4 numbers, each 0 or"),
        ("granite_swa", {"sliding_window": None}, "sliding_window in .* must be absent or have a value, got null"),
        ("granite_swa", {"layer_types": ["mamba"] * 4}, "layer_types in .* must be 4 times 'full_attention' or"),
        ("granite", {"layer_rope_theta": [0, 500.0]}, "layer_rope_theta in .* must be absent"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier in .* must be positive"),
        (
            "qwen3_moe_normed",
            {"model_type": "qwen3_vl_moe", "norm_topk_prob": False},
            "norm_topk_prob in .* must be True",
        ),
        ("qwen3", {"model_type": "qwen3_vl", "use_sliding_window": True}, "use_sliding_window in .* must be False"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers in .* must be at least 2 times 0 or 1, got \[1\]"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv in .* must be absent"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type in .* must be .*'longrope'"),
        ("phi4_mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor in .* must be at most 1, got 1.5"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default"}},
            "must have the field rope_parameters.llama_4_scaling_beta",
        ),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "layer_types in .* must be absent or 'full_attention'"),
        (
            "phi4_mini",
            {"partial_rotary_factor": 0.7},
            "partial_rotary_factor in .* must turn an even number of the 8 .*, got 5",
        ),
        (
            "gemma3",
            {"sliding_window_pattern": None, "_sliding_window_pattern": 2},
            "_sliding_window_pattern .* must be 6",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in .* must be absent"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention in .* must be False"),
        ("gemma3", {"layer_types": ["full_attention", "linear"]}, "layer_types in .* must be 2 times"),
        ("exaone4", {"sliding_window_pattern": "LLG"}, "sliding_window_pattern in .* must be int, got 'LLG'"),
        ("exaone4", {"layer_types": ["full_attention"]}, "layer_types in .* must be 3 times"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx in .* must be False"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights in .* must be True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention in .* must be False"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function in .* must be 'gelu' or .* got 'tanh'"),
        ("gpt2", {"n_head": 5}, "n_embd in .* must be a multiple of n_head = 5, got 32"),
        ("gpt2", {"n_inner": 40}, r"c_fc.weight in .* must have shape \(32, 40\), got \(32, 128\)"),
        ("apertus", {"hidden_act": "relu2"}, "hidden_act in .* must be 'xielu', the only value"),
        ("apertus", {"qk_norm": False}, "qk_norm in .* must be True"),
        ("apertus", {"post_norm": True}, "post_norm in .* must be False"),
        ("apertus", {"mlp_bias": True}, "mlp_bias in .* must be False"),
        ("apertus", {"rope_scaling": None}, "rope_scaling in .* must be absent or have a value, got null"),
        ("apertus_default", {"rope_theta": 500.0}, "rope_theta in .* must be 12000000.0, the only value"),
        ("arcee", {"hidden_act": "gelu"}, "hidden_act in .* must be 'relu2' or 'silu', .* got 'gelu'"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv in .* must be absent"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace in .* must be 0, the only value"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types in .* must be 3 times 'dense' or 'sparse'"),
        ("exaone4", {"reorder_qk_norm": False}, "reorder_qk_norm in .* must be True, the only value"),
        ("glm4", {"partial_rotary_factor": 0.2}, "partial_rotary_factor in .* must turn an even number of the 16"),
        ("hunyuan", {"use_cla": True}, "use_cla in .* must be False, the only value"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "rope_scaling.alpha in .* must be positive"),
        ("cohere", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', the only value"),
        ("cohere", {"logit_scale": None}, "logit_scale in .* must be absent or have a value, got null"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm in .* must be absent"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block in .* must be True, the only value"),
        ("cohere2", {"sliding_window": None}, "sliding_window in .* must be absent or have a value, got null"),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types in .* must be 4 times"),
        ("phi", {"hidden_act": "tanh"}, "hidden_act in .* must be 'gelu' or .* got 'tanh'"),
        ("phi", {"layer_norm_eps": None}, "layer_norm_eps in .* must be absent or have a value, got null"),
        ("phi", {"partial_rotary_factor": 0.2}, "partial_rotary_factor in .* must turn an even number of the 8 .*"),
        ("phi", {"qk_layernorm": False}, "tensor model.layers.0.self_attn.k_layernorm.bias in .* does not belong"),
        ("starcoder2", {"hidden_act": "swish"}, "hidden_act in .* must be 'gelu' or .* got 'swish'"),
        ("starcoder2", {"use_bias": False}, "tensor model.layers.0.mlp.c_fc.bias in .* does not belong to a model"),
        ("starcoder2", {"norm_epsilon": None}, "norm_epsilon in .* must be absent or have a value, got null"),
        ("gpt_neox", {"hidden_act": "mish"}, "hidden_act in .* must be 'gelu' or .* got 'mish'"),
        ("gpt_neox", {"head_dim": 16}, "head_dim in .* must be 8, the only value"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads in .* must be 4, the only value"),
        (
            "gpt_neox",
            {"num_attention_heads": 5},
            "hidden_size in .* must be a multiple of num_attention_heads = 5, got 32",
        ),
        ("gpt_neox", {"rotary_pct": None}, "rotary_pct in .* must be absent or have a value, got null"),
        ("gpt_neox", {"attention_bias": False}, "layers.0.attention.dense.bias in .* does not belong to a model"),
        ("stablelm", {"hidden_act": "mish"}, "hidden_act in .* must be 'gelu' or .* got 'mish'"),
        ("stablelm", {"head_dim": 16}, "head_dim in .* must be 8, the only value"),
        ("stablelm", {"qk_layernorm": False}, "self_attn.k_layernorm.norms.0.weight in .* does not belong to a model"),
        ("stablelm", {"use_qkv_bias": False}, "layers.0.self_attn.k_proj.bias in .* does not belong to a model"),
        ("olmo", {"hidden_act": "mish"}, "hidden_act in .* must be 'gelu' or .* got 'mish'"),
        ("olmo", {"clip_qkv": -8.0}, "clip_qkv in .* must be positive and finite, got -8.0"),
        ("olmo", {"attention_bias": False}, "layers.0.self_attn.k_proj.bias in .* does not belong to a model"),
        ("nemotron", {"hidden_act": "mish"}, "hidden_act in .* must be 'gelu' or .* got 'mish'"),
        ("nemotron", {"mlp_bias": False}, "layers.0.mlp.down_proj.bias in .* does not belong to a model"),
        ("nemotron", {"norm_eps": None}, "norm_eps in .* must be absent or have a value, got null"),
        ("falcon", {"alibi": True}, "alibi in .* must be False, the only value that specjax supports, got True"),
        ("falcon", {"activation": "mish"}, "activation in .* must be 'gelu' or .* got 'mish'"),
        ("falcon", {"head_dim": 16}, "head_dim in .* must be 8, the only value"),
        ("falcon", {"n_embed": 64}, "n_embed in .* must be 32, the only value"),
        ("falcon", {"multi_query": None}, "multi_query in .* must be absent or have a value, got null"),
        ("falcon", {"parallel_attn": False}, "parallel_attn in .* must be True, the only value"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, r"num_ln_in_parallel_attn in .* must be in \[1, 2\], got 3"),
        ("falcon", {"num_ln_in_parallel_attn": 1}, "h.0.input_layernorm.weight is missing"),
        (
            "falcon_multi_query",
            {"num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn in .* must be 1, the only value",
        ),
        ("falcon_serial", {"num_kv_heads": 2}, "num_kv_heads in .* must be 4, the only value"),
        ("minicpm3", {"scale_emb": None}, "scale_emb in .* must be absent or have a value, got null"),
        ("minicpm3", {"num_key_value_heads": 2}, "num_key_value_heads in .* must be 4, the only value"),
        ("minicpm3", {"scale_depth": -1.0}, "scale_depth in .* must be positive and finite, got -1.0"),
        ("minicpm3", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', the only value"),
        ("helium", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', the only value"),
        ("helium", {"head_dim": None}, r"q_proj.weight in .* must have shape \(512, 32\), got \(32, 32\)"),
        ("hyperclovax", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', the only value"),
        (
            "hyperclovax",
            {"use_post_norm": False},
            r"post_norm\d.weight in .* does not belong to a model of this config",
        ),
        ("hyperclovax", {"attention_multiplier": 0}, "attention_multiplier in .* must be positive and finite"),
        ("vaultgemma", {"hidden_activation": "silu"}, "hidden_activation in .* must be 'gelu_pytorch_tanh' or 'gelu'"),
        ("vaultgemma", {"layer_types": ["full_attention"]}, "layer_types in .* must be 2 times 'full_attention' or"),
        ("vaultgemma", {"model_type": "gemma2"}, "post_attention_layernorm.weight is missing"),
        ("nanochat", {"hidden_act": "gelu"}, "hidden_act in .* must be 'relu2', the only value"),
        (
            "nanochat",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type in .* must be 'default' or 'linear' or 'llama3'",
        ),
        ("nanochat", {"final_logit_softcapping": -1.0}, "final_logit_softcapping in .* must be positive"),
        ("nanochat", {"intermediate_size": 40}, r"fc1.weight in .* must have shape \(40, 32\)"),
        ("seed_oss", {"head_dim": 16}, "q_proj.weight in .* must have shape .64, 32., got .48, 32."),
        (
            "gemma3_capped",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters.rope_type in .* must be absent",
        ),
    ],
)
def test_fields_that_are_refused(case, change, message, tmp_path):
    directory = write(tmp_path / "model", case)
    (directory / "config.json").write_text(json.dumps(ALL[case] | change))
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("case", "change", "theta", "scaling", "windows"),
    [
        ("smollm3_window", {"sliding_window": None}, 500.0, None, (None, None)),
        ("ministral3", {"rope_parameters": None}, 1e6, YarnScaling(16.0, 16384, 1e6), (5, 5)),
        ("ministral3", {"rope_parameters": BETA, "rope_theta": None}, 1e4, None, (5, 5)),
        ("exaone4", {"sliding_window": None}, 500.0, None, (4096, None, 4096)),
        ("exaone4_full", {"sliding_window_pattern": "LLLG", "sliding_window": 7}, 500.0, None, (None, None)),
        ("exaone4", {"reorder_qk_norm": True}, 500.0, None, (5, None, 5)),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": 8.0}}, 500 * 8.0 ** (16 / 14), None, (None, None)),
        ("ernie4_5", {"rope_theta": None, "head_dim": 8}, 5e5, None, (None, None)),
    ],
)
def test_defaults_of_transformers(case, change, theta, scaling, windows, tmp_path):
    fields = {name: x for name, x in (ALL[case] | change).items() if x is not None}
    config = load(write(tmp_path / "model", case, config=fields)).apply.config
    assert (config.rope_theta, config.rope_scaling, config.windows) == (theta, scaling, windows)


def test_bases_of_layers(tmp_path):
    """They go before the base of all layers, whose scaling layers keep."""
    fields = ALL["granite_swa"] | {"rope_scaling": None, "rope_parameters": YARN | {"rope_theta": 9.0}}
    config = load(write(tmp_path / "model", "granite_swa", config=fields)).apply.config
    assert config.windows == (None, 5, 5, 5)
    assert [layer.mixer.rope.theta for layer in config.each_layer[1::2]] == [20.0, 500.0]
    assert [layer.mixer.rope.scaling.theta for layer in config.each_layer[1::2]] == [20.0, 500.0]
    assert [layer.mixer.rope == NO_ROPE for layer in config.each_layer] == [True, False, True, False]
    config = load(write(tmp_path / "none", "granite_swa", config=fields | {"layer_rope_theta": None})).apply.config
    assert [layer.mixer.rope for layer in config.each_layer] == [None] * 4 and config.rope.theta == 9.0


def test_factors_of_minicpm3(tmp_path):
    """Fields that are null say other factors than fields that are absent."""
    fields = {name: x for name, x in ALL["minicpm3"].items() if not name.startswith(("scale_", "dim_"))}
    config = load(write(tmp_path / "absent", "minicpm3", config=fields)).apply.config
    factors = config.embedding_factor, config.layers[0].mixer_factor, config.logit_divisor
    assert factors == (12.0, 1.4 / 2**0.5, 32 / 256)
    fields |= {"scale_depth": None, "dim_model_base": None, "rope_interleave": True}
    config = load(write(tmp_path / "null", "minicpm3", config=fields)).apply.config
    assert (config.layers[0].mixer_factor, config.logit_divisor) == (1.0, 1.0)
    assert not config.layers[0].mixer.is_interleaved


def test_phi_has_an_original_length(tmp_path):
    """The value is the default of transformers, which goes before the one in the table of rope."""
    fields = {name: x for name, x in ALL["phi4_mini"].items() if name != "original_max_position_embeddings"}
    config = load(write(tmp_path / "model", "phi4_mini", config=fields)).apply.config
    assert config.rope_scaling.original_length == 4096


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "ministral3", "granite4", "gpt_oss"])
def test_codes_where_fields_are_replaced(case, tmp_path):
    """Codes are read where a family has other defaults of fields, and where some matrices stay floats."""
    directory = write(tmp_path / "floats", case)
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    layer = load(tmp_path / "codes").params["layers"][0]
    assert isinstance(layer["qkv"], Quantized) and isinstance(layer["attention_out"], Quantized)


@pytest.mark.parametrize(
    "fields", [{"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}]
)
def test_layers_that_do_not_turn_need_no_base(fields, tmp_path):
    config = ALL["granite4_nope"] | {"rope_theta": None} | fields
    assert load(write(tmp_path / "model", "granite4_nope", config=config)).apply.config.rope.size == 0
