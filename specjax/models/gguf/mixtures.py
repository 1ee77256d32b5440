"""Architectures with experts in GGUF: the fields of config.json that say their sizes, and names of tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specjax.models.gguf import dense
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.places import Place

CHUNK_OF_LLAMA4 = 8192  # tokens of a part of a sequence, which files do not say
EXPERTS_OF_MAVERICK = 128  # Llama 4 Maverick lacks the norms of queries and keys of Scout
OF_LLAMA4 = (
    *((f"ffn_{name}", f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
    *((f"ffn_{name}_exps", f"feed_forward.experts.*.{name}_proj") for name in ("gate", "up", "down")),
    *((f"ffn_{name}_shexp", f"feed_forward.shared_expert.{name}_proj") for name in ("gate", "up", "down")),
    ("ffn_gate_inp", "feed_forward.router"),
)
OF_EXPERTS = (
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.*.gate_proj"),
    ("ffn_up_exps", "mlp.experts.*.up_proj"),
    ("ffn_down_exps", "mlp.experts.*.down_proj"),
)
OF_MIXTRAL = (
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.*.w1"),
    ("ffn_up_exps", "block_sparse_moe.experts.*.w3"),
    ("ffn_down_exps", "block_sparse_moe.experts.*.w2"),
)
OF_MINIMAX = (*OF_MIXTRAL, ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"))
OF_SHARED = tuple((f"ffn_{name}_shexp", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down"))
OF_QWEN2 = (
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    *((f"ffn_{name}_shexp", f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down")),
)
OF_HUNYUAN = (
    ("ffn_gate_inp", "mlp.gate.wg"),
    *((f"ffn_{name}_shexp", f"mlp.shared_mlp.{name}_proj") for name in ("gate", "up", "down")),
)
OF_AFMOE = (
    *OF_SHARED,
    ("ffn_gate_inp", "mlp.router.gate"),
    ("exp_probs_b.bias", "mlp.expert_bias"),
    ("attn_gate", "self_attn.gate_proj"),
    ("ffn_norm", "pre_mlp_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
)
OF_LAGUNA = (
    *OF_SHARED,
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("attn_gate", "self_attn.g_proj"),
)
OF_NEXTN = (  # of layers for multi-token prediction
    *((f"nextn.{name}", name) for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")),
    *((f"nextn.shared_head_{name}", f"shared_head.{name}") for name in ("head", "norm")),
)
OF_DOTS = (("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"), *OF_SHARED)
OF_GLM = (*OF_DOTS, dense.POST_NORMS[0], *OF_NEXTN)
OF_ERNIE = (("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias"), *OF_SHARED)
OF_GPT_OSS = (
    ("attn_sinks.weight", "self_attn.sinks"),
    dense.POST_NORMS[0],
    *((f"ffn_{name}_exps.bias", f"mlp.experts.{name}_proj_bias") for name in ("gate", "up", "down")),
    ("ffn_gate_inp", "mlp.router"),
)


def experts(fields: Fields, number: str = "num_experts") -> dict[str, Any]:
    """Return the sizes of experts; the field of config.json with their number has the name `number`."""
    size = fields.get("expert_feed_forward_length", int, None) or fields.get("feed_forward_length", int)
    return {
        number: fields.get("expert_count", int),
        "num_experts_per_tok": fields.get("expert_used_count", int),
        "moe_intermediate_size": size,
    }


def llama(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Llama, and of Mixtral."""
    common = dense.with_yarn(fields, config)
    if not fields.get("expert_count", int, 0):
        return common
    found = common | experts(fields, "num_local_experts")
    return found | {"model_type": "mixtral", "intermediate_size": found.pop("moe_intermediate_size")}


def llama4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Llama 4."""
    fields.only("attention.sliding_window", CHUNK_OF_LLAMA4)
    found = experts(fields, "num_local_experts")
    return found | {
        "model_type": "llama4_text",
        "intermediate_size": found.pop("moe_intermediate_size"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.get("interleave_moe_layer_step", int, 1),
        "attention_chunk_size": CHUNK_OF_LLAMA4,
        "use_qk_norm": found["num_local_experts"] != EXPERTS_OF_MAVERICK,
    }


def minimax_m2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of MiniMax-M2."""
    fields.only("expert_gating_func", 2)  # sigmoids
    found = dense.without_window(fields, config) | experts(fields, "num_local_experts")
    return found | {
        "model_type": "minimax_m2",
        "intermediate_size": found.pop("moe_intermediate_size"),
        "rotary_dim": fields.get("rope.dimension_count", int, config["head_dim"]),
    }


def qwen3_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Qwen3-MoE."""
    return dense.with_yarn(fields, config) | experts(fields) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def qwen2_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Qwen1.5-MoE and Qwen2-MoE."""
    size = fields.get("expert_shared_feed_forward_length", int, config["intermediate_size"])
    return dense.with_yarn(fields, config) | {
        **experts(fields),
        "model_type": "qwen2_moe",
        "qkv_bias": config["attention_bias"],
        "shared_expert_intermediate_size": size,
    }


def olmoe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of OLMoE."""
    found = dense.without_window(fields, config) | experts(fields)
    return found | {"intermediate_size": found.pop("moe_intermediate_size")}


def hunyuan(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Hunyuan-A13B; the base of its rotation is stretched in the file."""
    fields.only("expert_shared_feed_forward_length", config["intermediate_size"])
    found = dense.without_window(fields, config) | experts(fields)
    return found | {
        "model_type": "hunyuan_v1_moe",
        "moe_topk": found.pop("num_experts_per_tok"),
        "num_shared_expert": fields.get("expert_shared_count", int, 1),
    }


def afmoe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Trinity."""
    fields.only("expert_gating_func", 2)  # sigmoids
    fields.only("expert_weights_norm", True)
    window = fields.get("attention.sliding_window", int)
    return dense.three_of_four_slide(fields, config) | {
        **experts(fields),
        "sliding_window": window,
        "rope_theta": fields.get("rope.freq_base_swa", float, config["rope_theta"]),  # others do not turn
        "num_shared_experts": fields.get("expert_shared_count", int),
        "num_dense_layers": fields.get("leading_dense_block_count", int, 0),
        "route_scale": fields.get("expert_weights_scale", float, 1.0),
        "n_group": fields.get("expert_group_count", int, 1),
        "mup_enabled": True,
    }


def laguna(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Laguna."""
    fields.only("expert_gating_func", 2)  # sigmoids
    fields.only("expert_weights_norm", True)
    number, size = config["num_hidden_layers"], config["head_dim"]
    heads = fields.of_layers("attention.head_count", number)
    window = fields.get("attention.sliding_window", int, 0)
    slides = fields.slides(number, [i % 4 != 0 for i in range(number)]) if window else [False] * number
    gate = fields.header.tensors.get("blk.0.attn_gate.weight")
    by_head = gate is None or gate.shape[0] == heads[0]
    num_dense = fields.get("leading_dense_block_count", int, 0)
    return {
        **experts(fields),
        "model_type": "laguna",
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if by_head else "per-element",
        "layer_types": dense.layer_types(slides),
        "sliding_window": window,
        "mlp_layer_types": ["dense" if i < num_dense else "sparse" for i in range(number)],
        "shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length", int),
        "moe_routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "rope_parameters": _turns_of_laguna(fields, config["rope_theta"], size),
    }


def _turns_of_laguna(fields: Fields, theta: float, size: int) -> dict[str, Any]:
    """Return how the heads of layers without and with windows turn, given a base and the size of a head."""
    fields.only("rope.scaling.type", "none", "yarn")
    full = fields.yarn() or {"rope_type": "default"}
    turned, sliding = (fields.get(f"rope.dimension_count{end}", int, size) for end in ("", "_swa"))
    return {
        "full_attention": full | {"rope_theta": theta, "partial_rotary_factor": turned / size},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": fields.get("rope.freq_base_swa", float, theta),
            "partial_rotary_factor": sliding / size,
        },
    }


def ernie4_5_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of ERNIE 4.5 with experts."""
    found = dense.without_window(fields, config) | experts(fields, "moe_num_experts")
    return found | {
        "model_type": "ernie4_5_moe",
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_num_shared_experts": fields.get("expert_shared_count", int, 0),
        "moe_layer_start_index": fields.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": fields.get("interleave_moe_layer_step", int, 1),
    }


def glm4_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of GLM-4.5."""
    number = fields.get("nextn_predict_layers", int, 0)
    return _sigmoid_experts(fields) | {
        "model_type": "glm4_moe",
        "num_hidden_layers": config["num_hidden_layers"] - number,
        "num_nextn_predict_layers": number,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.header.tensors,
        "partial_rotary_factor": fields.get("rope.dimension_count", int, config["head_dim"]) / config["head_dim"],
    }


def dots1(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dots.llm1."""
    return _sigmoid_experts(fields) | {"sliding_window": None}


def _sigmoid_experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of config.json about the experts of GLM-4.5; raise ValueError where layers have windows."""
    fields.only("attention.sliding_window", 0)
    fields.only("expert_gating_func", 2)  # sigmoids
    return experts(fields, "n_routed_experts") | {
        "n_shared_experts": fields.get("expert_shared_count", int, 1),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
    }


def gpt_oss(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of gpt-oss."""
    sizes = experts(fields, "num_local_experts")
    found = sizes | {
        "model_type": "gpt_oss",
        "intermediate_size": sizes.pop("moe_intermediate_size"),
        "sliding_window": fields.get("attention.sliding_window", int),
    }
    scaling = fields.yarn()
    return found if scaling is None else found | {"rope_scaling": scaling | {"truncate": False}}  # files do not say it


def as_row(name: str, place: Place, config: dict[str, Any], *, ending: str) -> Iterator[tuple[str, Place]]:
    """Return the tensor of transformers that a tensor holds: a table of one row where its name has the ending."""
    yield name, replace(place, own_shape=(1, place.entry.shape[-1])) if name.endswith(ending) else place
