"""Small checkpoints of every family: their configs, in the fields of transformers 4, and weights made from a seed."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"
NUM_TOKENS = 12
LENGTHS = (12, 9)  # of the rows: the second is padded

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA = SIZES | {
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = LLAMA | {"head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
GEMMA |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
MOE = LLAMA | {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
GPT2 = {  # in the names of fields of GPT-2
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# in the fields of families whose norms subtract the mean
CENTRED = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"}
NEOX = {name: value for name, value in CENTRED.items() if name not in ("num_key_value_heads", "rope_theta")}
NEOX |= {"model_type": "gpt_neox"}
FALCON = SIZES | {"model_type": "falcon", "rope_theta": 500.0}
OPT = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1, "eos_token_id": 2}

CONFIGS = {
    "llama": LLAMA | {"model_type": "llama", "num_key_value_heads": 4, "rope_theta": 10000.0},
    "llama3": LLAMA
    | {"model_type": "llama", "rope_scaling": LLAMA3_SCALING, "head_dim": 16, "tie_word_embeddings": True},
    "llama3_beside": LLAMA
    | {
        "model_type": "llama",
        "rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 32},
        "original_max_position_embeddings": 16,
    },
    "llama_linear": LLAMA | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_bias": LLAMA | {"model_type": "llama", "attention_bias": True},
    "llama_mlp_bias": LLAMA | {"model_type": "llama", "mlp_bias": True},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral_window": LLAMA | {"model_type": "mistral", "sliding_window": 5},
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6, "mlp_only_layers": [0]},
    "qwen3_moe_normed": MOE
    | {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "num_experts_per_tok": 3},
    "gpt_oss": LLAMA
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_limit": 1.5,  # with these weights it clips
        "rope_scaling": YARN,
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "gemma": GEMMA | {"model_type": "gemma", "num_key_value_heads": 1},
    "gemma2": GEMMA
    | {
        "model_type": "gemma2",
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma2_gelu": GEMMA | {"model_type": "gemma2", "hidden_activation": "gelu", "sliding_window": 5},
    "cohere": LLAMA
    | {
        "model_type": "cohere",
        "layer_norm_eps": 1e-3,
        "logit_scale": 0.8333,
        "use_qk_norm": True,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "phi": CENTRED | {"model_type": "phi", "layer_norm_eps": 1e-3, "partial_rotary_factor": 0.25, "qk_layernorm": True},
    "starcoder2": CENTRED
    | {"model_type": "starcoder2", "norm_epsilon": 1e-3, "sliding_window": 5, "tie_word_embeddings": True},
    "gpt_neox": NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500, "layer_norm_eps": 1e-3},
    "stablelm": CENTRED
    | {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}
    | {"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5},
    "nemotron": CENTRED
    | {"model_type": "nemotron", "head_dim": 12, "norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True},
    "falcon": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "layer_norm_epsilon": 1e-3},
    "falcon_multi_query": FALCON | {"ffn_hidden_size": 48},
    "opt": OPT | {"model_type": "opt"},
    "opt_post_norm": OPT | {"model_type": "opt", "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt_no_final_norm": OPT | {"model_type": "opt", "_remove_final_layer_norm": True},
}

TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 8,
}
PARTIAL = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0]}
GEMMA4 = GEMMA | {
    "model_type": "gemma4_text",
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
}
GLM = MOE | {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
LATENTS = GLM | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
LATENTS.pop("partial_rotary_factor")
LAGUNA = {"model_type": "laguna", "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5}
LAGUNA |= {"shared_expert_intermediate_size": 24}
LLAMA4 = {
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size": 20,
    "intermediate_size_mlp": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "head_dim": 16,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 2,
}
FACTORS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 3.0,
}
# Configs that only the logits of transformers are compared with: the other tests of families see the same parts above.
MTP = "glm4_moe_groups", "deepseek_v3"  # cases that have a layer for multi-token prediction, too
VARIANTS = {
    "llama_dynamic": LLAMA
    | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 8},
    "llama_longrope": LLAMA | {"model_type": "llama", "rope_scaling": LONGROPE | {"factor": 8.0}},
    "llama_short": LLAMA
    | {"model_type": "llama", "rope_scaling": LONGROPE | {"original_max_position_embeddings": 16, "factor": 4.0}},
    "llama_yarn": LLAMA
    | {"model_type": "llama", "rope_scaling": YARN | {"truncate": True, "mscale": 2.0, "mscale_all_dim": 0.5}},
    "gemma3": GEMMA
    | {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "rope_theta": 500.0,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma3_capped": GEMMA
    | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu",
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": TWO_BASES,
        "final_logit_softcapping": 8.0,
    },
    "phi3": LLAMA
    | {
        "model_type": "phi3",
        "rope_scaling": {name: x for name, x in LONGROPE.items() if name != "rope_type"} | {"type": "su"},
        "original_max_position_embeddings": 8,
        "sliding_window": 5,
    },
    "phi4_mini": LLAMA
    | {
        "model_type": "phi3",
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE | PARTIAL,
        "original_max_position_embeddings": 32,
    },
    "olmo2": LLAMA | {"model_type": "olmo2", "attention_bias": True, "num_key_value_heads": 4},
    "olmo3": LLAMA
    | {
        "model_type": "olmo3",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": YARN | {"truncate": True, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "smollm3": LLAMA | {"model_type": "smollm3", "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "smollm3_window": LLAMA
    | {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granite": LLAMA | FACTORS | {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granite4": LLAMA
    | FACTORS
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "granite4_nope": LLAMA
    | FACTORS
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 48,
        "position_embedding_type": "nope",
    },
    "ministral3": LLAMA
    | {
        "model_type": "ministral3",
        "head_dim": 12,
        "sliding_window": 5,
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 4, "beta_fast": 0.5, "beta_slow": 0.1}
        | {"llama_4_scaling_beta": 0.5, "rope_theta": 500.0}
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 64},
    },
    "gemma4": GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 8.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "gemma4_values": GEMMA4,
    "gemma4_small": GEMMA4
    | {
        "num_hidden_layers": 6,
        "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 8.0,
    },
    "gemma4_unified": {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
    | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_moe": GEMMA4
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20},
    "afmoe": MOE
    | {
        "model_type": "afmoe",
        "head_dim": 16,
        "num_experts": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "laguna": MOE
    | LAGUNA
    | {
        "num_attention_heads_per_layer": [4, 8],
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": YARN | {"truncate": True, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
        "moe_routed_scaling_factor": 2.5,
    },
    "laguna_elements": MOE
    | LAGUNA
    | {"gating": "per-element", "mlp_layer_types": ["sparse", "sparse"], "attention_bias": True},
    "mellum": MOE
    | {
        "model_type": "mellum",
        "head_dim": 16,
        "num_experts": 6,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "rope_parameters": {
            "full_attention": YARN | {"truncate": True, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "mellum_default": MOE | {"model_type": "mellum", "num_experts": 4, "attention_bias": True, "norm_topk_prob": False},
    "ministral": LLAMA
    | {
        "model_type": "ministral",
        "head_dim": 12,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mistral4": LATENTS
    | {
        "model_type": "mistral4",
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 4, "beta_fast": 0.5, "beta_slow": 0.1, "truncate": True}
        | {"llama_4_scaling_beta": 0.5, "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "llama4": LLAMA | LLAMA4 | {"num_hidden_layers": 3},
    "llama4_between": LLAMA
    | LLAMA4
    | {
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": True,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "glm": LLAMA | {"model_type": "glm", "head_dim": 8, "attention_bias": True},
    "glm4": LLAMA | {"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False},
    "ernie4_5": LLAMA | {"model_type": "ernie4_5", "use_bias": True, "head_dim": None, "tie_word_embeddings": True},
    "ernie4_5_moe": LLAMA | ERNIE,
    "ernie4_5_moe_between": LLAMA
    | ERNIE
    | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 0, "tie_word_embeddings": True},
    "arcee": LLAMA | {"model_type": "arcee", "hidden_act": "relu2", "head_dim": 12, "attention_bias": True},
    "cwm": LLAMA
    | {"model_type": "cwm", "num_hidden_layers": 5, "sliding_window": 5, "head_dim": 16, "mlp_bias": True}
    | {"rope_scaling": LLAMA3_SCALING},
    "cwm_default": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"model_type": "cwm", "num_hidden_layers": 5, "sliding_window": 4, "head_dim": 16},
    "internlm3": LLAMA
    | {"model_type": "internlm3", "head_dim": 8, "qkv_bias": True, "bias": True}
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "iquestcoder": LLAMA | {"model_type": "iquestcoder", "head_dim": 16, "clip_qkv": None, "use_sliding_window": False},
    "solar_open": GLM
    | {"model_type": "solar_open", "head_dim": 16, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    "youtu": LLAMA
    | {name: size for name, size in LATENTS.items() if name.startswith(("num_key", "kv_", "q_", "qk_", "v_"))}
    | {"model_type": "youtu", "tie_word_embeddings": True},
    "exaone4": LLAMA
    | {"model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2},
    "exaone4_full": LLAMA | {"model_type": "exaone4", "sliding_window": None, "layer_types": 2 * ["full_attention"]},
    "exaone_moe": LLAMA
    | {"model_type": "exaone_moe", "num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": "LLG"}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "moe_intermediate_size": 20}
    | {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "n_group": 4, "topk_group": 2},
    "exaone_moe_dense_between": LLAMA
    | {"model_type": "exaone_moe", "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    | {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
    | {"mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": True},
    "cohere_untied": LLAMA | {"model_type": "cohere", "layer_norm_eps": 1e-5, "head_dim": 12},
    "cohere2": LLAMA
    | {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 5, "layer_norm_eps": 1e-5}
    | {"logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2_bias": LLAMA
    | {"model_type": "cohere2", "num_hidden_layers": 3, "sliding_window": 4, "sliding_window_pattern": 2}
    | {"layer_norm_eps": 1e-5, "attention_bias": True, "head_dim": 12},
    "hunyuan": LLAMA
    | {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "attention_bias": True,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
    "hunyuan_moe": LLAMA
    | {"model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 6, "moe_topk": 3, "tie_word_embeddings": True},
    "minimax_m2": LLAMA
    | {"model_type": "minimax_m2", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
    "olmoe": LLAMA | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "olmoe_normed": LLAMA
    | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    | {"attention_bias": True},
    "qwen2_moe": MOE
    | {"model_type": "qwen2_moe", "num_experts": 6, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "seed_oss": LLAMA | {"model_type": "seed_oss", "head_dim": 12, "attention_out_bias": True, "mlp_bias": True},
    "glm4_moe": GLM,
    "glm4_moe_groups": GLM
    | {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 4,
        "topk_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "partial_rotary_factor": 0.25,
        "head_dim": 16,
    },
    "glm4_moe_lite": LATENTS | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"]},
    "deepseek_v3": LATENTS
    | {
        "model_type": "deepseek_v3",
        "attention_bias": True,
        "n_group": 4,
        "topk_group": 2,
        "n_routed_experts": 8,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": True},
    },
    "deepseek_v3_whole_queries": LATENTS
    | {"model_type": "deepseek_v3", "q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
}
VARIANTS |= {
    "gpt2": GPT2,
    "gpt2_untied": GPT2
    | {"n_inner": 48, "activation_function": "gelu", "layer_norm_epsilon": 0.1, "tie_word_embeddings": False},
}
VARIANTS |= {
    "apertus": LLAMA
    | {"model_type": "apertus", "rope_scaling": LLAMA3_SCALING, "qk_norm": True, "post_norm": False}
    | {"attention_bias": True, "tie_word_embeddings": True},
    "apertus_default": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"model_type": "apertus", "head_dim": 16},
}
VARIANTS |= {
    "dots1": {name: value for name, value in GLM.items() if name != "partial_rotary_factor"}
    | {"model_type": "dots1", "attention_bias": True, "sliding_window": 5, "max_window_layers": 1}
    | {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "dots1_default": MOE | {"model_type": "dots1", "head_dim": 16, "n_routed_experts": 6, "n_shared_experts": 1},
}
VARIANTS |= {
    "phi_default": CENTRED
    | {"model_type": "phi", "num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "relu2"},
    "gpt_neox_serial": NEOX
    | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
    "stablelm_serial": CENTRED | {"model_type": "stablelm", "hidden_act": "gelu", "tie_word_embeddings": True},
    "olmo": CENTRED | {"model_type": "olmo", "clip_qkv": 1.5, "attention_bias": True},
    "olmo_plain": CENTRED | {"model_type": "olmo", "hidden_act": "relu", "tie_word_embeddings": True},
    "nemotron_plain": CENTRED
    | {"model_type": "nemotron", "hidden_act": "silu", "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    "falcon_serial": FALCON
    | {"multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False}
    | {"activation": "relu"},
    "falcon_one_norm": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 48}
    | {"bias": True},
    "starcoder2_plain": CENTRED | {"model_type": "starcoder2", "use_bias": False, "hidden_act": "gelu"},
    "cohere2_moe": LLAMA
    | {"model_type": "cohere2_moe", "num_hidden_layers": 5, "head_dim": 16, "layer_norm_eps": 1e-5}
    | {"sliding_window": 5, "sliding_window_pattern": 2, "first_k_dense_replace": 2, "attention_bias": True}
    | {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "prefix_dense_intermediate_size": 40}
    | {"expert_selection_fn": "sigmoid", "logit_scale": 0.25, "rms_norm_eps": None, "tie_word_embeddings": True},
    "cohere2_moe_means": LLAMA
    | {"model_type": "cohere2_moe", "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 4}
    | {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2, "rms_norm_eps": 1e-3}
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}
    | {"shared_expert_combination_strategy": "sum"},
}
SWASH = LLAMA | FACTORS | {"num_hidden_layers": 4, "sliding_window": 5, "layer_rope_theta": [0, 20.0, 0.0, 500]}
VARIANTS |= {
    "granite_swa": SWASH
    | {"model_type": "granite_swa", "rope_scaling": YARN, "attention_bias": True, "mlp_bias": True},
    "granitemoe_swa": SWASH
    | {"model_type": "granitemoe_swa", "num_hidden_layers": 2, "layer_rope_theta": None}
    | {"layer_types": ["sliding_attention", "full_attention"], "shared_intermediate_size": 24}
    | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20},
}
VARIANTS |= {
    "hy_v3": MOE
    | {"model_type": "hy_v3", "head_dim": 16, "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3}
    | {"num_shared_experts": 2, "router_scaling_factor": 1.5, "attention_bias": True},
    "hy_v3_by_name": MOE
    | {"model_type": "hy_v3", "head_dim": 8, "num_experts": 4, "mlp_layer_types": ["sparse", "dense"]}
    | {"tie_word_embeddings": True},
}
VARIANTS |= {
    "flex_olmo": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"model_type": "flex_olmo", "num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    "flex_olmo_normed": LLAMA
    | {"model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    | {"tie_word_embeddings": True},
}
VARIANTS |= {
    "minicpm3": LLAMA
    | {name: size for name, size in LATENTS.items() if name.startswith(("num_key", "kv_", "q_", "qk_", "v_"))}
    | {"model_type": "minicpm3", "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 12}
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "minicpm3_whole_queries": LLAMA
    | {name: size for name, size in LATENTS.items() if name.startswith(("num_key", "kv_", "qk_nope"))}
    | {"model_type": "minicpm3", "q_lora_rank": None, "qk_rope_head_dim": 8, "rope_scaling": LONGROPE}
    | {"scale_depth": None, "dim_model_base": None},
}
VARIANTS |= {
    "helium": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"model_type": "helium", "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "helium_tied": LLAMA | {"model_type": "helium", "head_dim": 8, "tie_word_embeddings": True},
}
VARIANTS |= {
    "hyperclovax": LLAMA
    | FACTORS
    | {"model_type": "hyperclovax", "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "hyperclovax_without_post_norms": LLAMA
    | {"model_type": "hyperclovax", "use_post_norm": False, "logits_scaling": 0.5, "tie_word_embeddings": True},
}
VARIANTS |= {
    "vaultgemma": GEMMA
    | {"model_type": "vaultgemma", "sliding_window": 5, "query_pre_attn_scalar": 24}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0},
    "vaultgemma_gelu": GEMMA
    | {"model_type": "vaultgemma", "hidden_activation": "gelu", "attn_logit_softcapping": None}
    | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
}
VARIANTS |= {
    "sarvam_moe": {name: value for name, value in MOE.items() if name != "rope_theta"}
    | {"model_type": "sarvam_moe", "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"n_shared_experts": 2, "first_k_dense_replace": 1, "attention_bias": True},
    "sarvam_moe_groups": MOE
    | {"model_type": "sarvam_moe", "head_dim": 16, "n_routed_experts": 8, "use_qk_norm": False}
    | {"first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
}
VARIANTS |= {
    "nanochat": {name: value for name, value in LLAMA.items() if name != "rope_theta"} | {"model_type": "nanochat"},
    "nanochat_bias": LLAMA
    | {"model_type": "nanochat", "rope_scaling": LLAMA3_SCALING, "attention_bias": True, "head_dim": 12}
    | {"final_logit_softcapping": None, "tie_word_embeddings": True, "rms_norm_eps": 0.1},
}
VARIANTS |= {
    "phimoe": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {"model_type": "phimoe", "num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}
    | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 5}
    | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 32, "short_mscale": 1.2, "long_mscale": 1.2}},
    "phimoe_without_biases": LLAMA
    | {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
}
VARIANTS |= {
    "mimo_v2_flash": {name: value for name, value in MOE.items() if name != "rope_theta"}
    | {"model_type": "mimo_v2_flash", "num_hidden_layers": 4, "head_dim": 16, "v_head_dim": 12, "sliding_window": 5}
    | {"n_routed_experts": 6, "num_experts_per_tok": 3, "attention_bias": True, "attention_value_scale": 0.5}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.5},
        }
    },
    "mimo_v2_flash_default": {name: value for name, value in MOE.items() if name != "rope_theta"}
    | {"model_type": "mimo_v2_flash", "head_dim": 12, "v_head_dim": 12, "n_routed_experts": 4}
    | {"num_key_value_heads": 1, "attention_value_scale": None, "sliding_window_size": 3},
}
ALL = CONFIGS | VARIANTS


def tokens() -> np.ndarray:
    """Tokens [2, NUM_TOKENS]; what lies past LENGTHS is padding."""
    return np.random.default_rng(0).integers(2, SIZES["vocab_size"], (len(LENGTHS), NUM_TOKENS)).astype(np.int32)


def make_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor that depends on nothing but its name and shape; scales of norms are around 1, biases around 0."""
    uniform = np.random.default_rng(zlib.crc32(name.encode())).random(shape) * 2 - 1
    if len(shape) == 1 or name.endswith("A_log"):
        return (uniform * 0.5 + ("norm.weight" in name)).astype(np.float32)
    return (uniform * (4 / shape[1] ** 0.5 if "embed" not in name else 1)).astype(np.float32)


def shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by name, as transformers writes them."""
    recorded = json.loads((GOLDENS / "shapes.json").read_text())[case]
    return {name: tuple(shape) for name, shape in recorded.items()}


def mtp_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer for multi-token prediction, whose decoder layer is as the last layer is."""
    number, hidden = ALL[case]["num_hidden_layers"], ALL[case]["hidden_size"]
    last, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    layer = {name.replace(last, own): shape for name, shape in shapes(case).items() if name.startswith(last)}
    norms = {f"{own}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return layer | norms | {f"{own}eh_proj.weight": (hidden, 2 * hidden)}


def write(
    directory: Path,
    case: str,
    dtype: np.dtype = np.float32,
    config: dict | None = None,
    renamed: Callable[[str], str] = str,
) -> Path:
    """A checkpoint of the case in a new directory, with other fields and names of tensors where they are given."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(ALL[case] if config is None else config))
    tensors = {renamed(name): make_tensor(name, shape).astype(dtype) for name, shape in shapes(case).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory
