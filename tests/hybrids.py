"""Small checkpoints of hybrids: their configs, and weights made from a seed as in families.py."""

import json
from pathlib import Path

import numpy as np
from families import GOLDENS, LLAMA, make_tensor
from safetensors.numpy import save_file

NUM_TOKENS = 131  # of the row that is recorded: two chunks of the delta rule and three tokens

HYBRID = {name: value for name, value in LLAMA.items() if name != "rope_theta"} | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
SECTIONS = HYBRID["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
CONFIGS = {
    "qwen3_next": HYBRID | MIXTURE | {"model_type": "qwen3_next", "norm_topk_prob": True},
    "qwen3_5_text": HYBRID | {"model_type": "qwen3_5_text", "rope_parameters": SECTIONS},
    "qwen3_5_moe_text": HYBRID | MIXTURE | {"model_type": "qwen3_5_moe_text", "rope_parameters": SECTIONS},
}

GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 20,
    "intermediate_size": 24,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
CONFIGS["granite_h"] = {**LLAMA, **GRANITE}
CONFIGS["granite_h_moe"] = CONFIGS["granite_h"] | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
}

NEMOTRON = {
    "model_type": "nemotron_h",
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 1e-30,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
}
CONFIGS["nemotron_h"] = LLAMA | NEMOTRON | {"hybrid_override_pattern": "M*-M-", "num_hidden_layers": 5, "head_dim": 16}
CONFIGS["nemotron_h_moe"] = CONFIGS["nemotron_h"] | {
    "hybrid_override_pattern": "ME*EM",
    "use_bias": True,
    "use_conv_bias": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "silu",
}
CONFIGS["nemotron_h_latents"] = CONFIGS["nemotron_h_moe"] | {"moe_latent_size": 12, "mlp_hidden_act": "relu2"}

LFM2 = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"} | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-5,
}
CONFIGS["lfm2"] = LFM2 | {"model_type": "lfm2", "conv_L_cache": 4, "block_multiple_of": 8}
CONFIGS["lfm2_moe"] = LFM2 | {
    "model_type": "lfm2_moe",
    "tie_word_embeddings": True,
    "conv_bias": True,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
CONFIGS["lfm3"] = {name: value for name, value in LFM2.items() if name != "rope_theta"} | {
    "model_type": "lfm3",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    "sliding_window": 9,
    "head_dim": 16,
}

OLMO = {name: value for name, value in LLAMA.items() if name != "rope_theta"} | {
    "model_type": "olmo_hybrid",
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONFIGS["olmo_hybrid"] = OLMO | {
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-3,
}
CONFIGS["olmo_hybrid_turned"] = OLMO | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "layer_types": None,
    "linear_conv_kernel_dim": 3,
    "linear_allow_neg_eigval": False,
}

KIMI = {name: value for name, value in LLAMA.items() if name != "rope_theta"} | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CONFIGS["kimi_linear"] = KIMI | {"n_shared_experts": 2, "routed_scaling_factor": 1.5}
CONFIGS["kimi_linear_bias"] = KIMI | {
    "q_lora_rank": 12,
    "attention_bias": True,
    "norm_topk_prob": False,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "linear_conv_kernel_dim": 3,
}

CONFIGS["bamba"] = LLAMA | {
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
}
CONFIGS["bamba_plain"] = LLAMA | {
    "model_type": "bamba",
    "num_hidden_layers": 2,
    "attn_layer_indices": [1, 4],
    "tie_word_embeddings": True,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}

FALCON = LLAMA | {
    "model_type": "falcon_h1",
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_ssm": 48,
    "mamba_d_head": 12,
    "mamba_d_conv": 4,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 0.9],
    "ssm_multipliers": [0.7, 0.5, 0.6, 1.2, 0.8],
    "ssm_out_multiplier": 1.1,
}
CONFIGS["falcon_h1"] = FALCON | {
    "attention_in_multiplier": 1.2,
    "ssm_in_multiplier": 1.25,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mlp_bias": True,
    "projectors_bias": True,
}
CONFIGS["falcon_h1_gated_last"] = FALCON | {
    "tie_word_embeddings": True,
    "head_dim": 16,
    "attention_bias": True,
    "mamba_rms_norm": True,
    "mamba_n_groups": 1,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
}
CONFIGS["falcon_h1_plain"] = LLAMA | {
    "model_type": "falcon_h1",
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_ssm": None,
    "mamba_d_head": 16,
}

MTP = "nemotron_h_latents"  # the case of Nemotron whose module for multi-token prediction is compared

# The names of transformers in files where they are not the model's.
IN_FILES = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}

SMALL = CONFIGS["qwen3_5_text"] | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL_GRANITE = CONFIGS["granite_h"] | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}


def tokens() -> np.ndarray:
    """Tokens [1, NUM_TOKENS]."""
    return np.random.default_rng(1).integers(2, HYBRID["vocab_size"], (1, NUM_TOKENS)).astype(np.int32)


def shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by name, as transformers writes them."""
    recorded = json.loads((GOLDENS / "hybrids.json").read_text())[case]
    return {name: tuple(shape) for name, shape in recorded.items()}


def mtp_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors for multi-token prediction, whose layer is as the one that attends."""
    layer, hidden = "model.layers.1.", HYBRID["hidden_size"]
    found = {"mtp.layers.0." + name[len(layer) :]: shape for name, shape in shapes(case).items() if layer in name}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return found | {f"mtp.{norm}.weight": (hidden,) for norm in norms} | {"mtp.fc.weight": (hidden, 2 * hidden)}


def nemotron_mtp_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors for multi-token prediction of Nemotron, with layers as the target has."""
    hidden, pattern = HYBRID["hidden_size"], CONFIGS[case]["hybrid_override_pattern"]
    found = {}
    for i, sign in enumerate("*E"):
        layer = f"model.layers.{pattern.index(sign)}."
        own = {name: shape for name, shape in shapes(case).items() if name.startswith(layer)}
        found |= {f"mtp.layers.{i}.{name[len(layer) :]}": shape for name, shape in own.items()}
    norms = "0.enorm", "0.hnorm", "1.final_layernorm"
    found["mtp.layers.0.eh_proj.weight"] = hidden, 2 * hidden
    return found | {f"mtp.layers.{norm}.weight": (hidden,) for norm in norms}


def write(
    directory: Path, case: str, config: dict | None = None, prefix: str = "model.", has_mtp: bool = False
) -> Path:
    """A checkpoint of the case in a new directory, in whose names the prefix stands for "model."."""
    directory.mkdir()
    config = CONFIGS[case] if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    of_mtp = nemotron_mtp_shapes if case.startswith("nemotron") else mtp_shapes
    named_shapes = shapes(case) | (of_mtp(case) if has_mtp else {})
    others = "model.layers.2." if config.get("text_config", config)["num_hidden_layers"] == 2 else "no such layer"
    tensors = {name: make_tensor(name, shape) for name, shape in named_shapes.items() if others not in name}
    for own, in_files in IN_FILES.items():
        tensors = {name.replace(own, in_files): values for name, values in tensors.items()}
    named = {prefix + name[6:] if name.startswith("model.") else name: values for name, values in tensors.items()}
    save_file(named, directory / "model.safetensors")
    return directory
