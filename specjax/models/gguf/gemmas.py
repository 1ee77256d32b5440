"""Gemma and its successors in GGUF: Gemma 2, 3 and 4."""

from typing import Any

from specjax.models.gguf import dense, mixtures
from specjax.models.gguf.blocks import floats_of
from specjax.models.gguf.fields import Fields

LAYERS_OF_27B = 46  # Gemma 2 of 27 billion parameters scales its queries by the width of a head in the hidden size
LAYERS_OF_GEMMA3_27B = 62
GEMMA_NORMS = (("ffn_norm", "pre_feedforward_layernorm"), *dense.POST_NORMS)
OF_GEMMA4 = (
    *GEMMA_NORMS,
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("layer_output_scale.weight", "layer_scalar"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("ffn_gate_inp", "router.proj"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps", "experts.*.gate_up_proj"),
    ("ffn_down_exps", "experts.*.down_proj"),
)


def gemma2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Gemma 2."""
    is_27b = config["num_hidden_layers"] == LAYERS_OF_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "sliding_window": fields.get("attention.sliding_window", int, 4096),
        "attn_logit_softcapping": fields.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": float(width),
        "attention_bias": False,
    }


def gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Gemma 3."""
    is_27b = config["num_hidden_layers"] == LAYERS_OF_GEMMA3_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "model_type": "gemma3_text",
        "sliding_window": fields.get("attention.sliding_window", int),
        "rope_theta": fields.get("rope.freq_base", float, 1e6),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", float, 1e4),
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, None),
        "query_pre_attn_scalar": float(width),
    }


def gemma4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Gemma 4."""
    number, header = config["num_hidden_layers"], fields.header
    slides = fields.slides(number)
    kv_heads, widths = (fields.of_layers(name, number) for name in ("attention.head_count_kv", "feed_forward_length"))
    num_own = number - fields.get("attention.shared_kv_layers", int, 0)
    full = [i for i, one in enumerate(slides) if not one]
    sliding = [i for i, one in enumerate(slides) if one] or full
    size = fields.get("attention.key_length", int)
    return {
        "model_type": "gemma4_text",
        "layer_types": dense.layer_types(slides),
        "sliding_window": fields.get("attention.sliding_window", int),
        "head_dim": fields.get("attention.key_length_swa", int, size),
        "global_head_dim": size,
        "num_key_value_heads": kv_heads[sliding[0]],
        "num_global_key_value_heads": kv_heads[full[0]] if full else None,
        "attention_k_eq_v": any(i < num_own and f"blk.{i}.attn_v.weight" not in header.tensors for i in full),
        "num_kv_shared_layers": number - num_own,
        "use_double_wide_mlp": len({*widths}) > 1,
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, None),
        "rope_parameters": _turns_of_gemma4(fields, size),
        **_experts_of_gemma4(fields),
    }


def _turns_of_gemma4(fields: Fields, size: int) -> dict[str, Any]:
    """Return how heads turn; those that see all turn in part, which a tensor says by factors of frequencies."""
    fields.only("rope.scaling.type", "none")
    entry = fields.header.tensors.get("rope_freqs.weight")
    if entry is None:
        raise ValueError(f"tensor rope_freqs.weight is missing from {fields.header.path}")
    factors = floats_of(fields.header.bytes_of(entry), entry.kind.name).ravel()
    turned = int((factors == 1).sum())
    if len(factors) != size // 2 or not (factors[:turned] == 1).all() or (factors[turned:] < 1e29).any():
        raise ValueError(
            f"tensor rope_freqs.weight in {fields.header.path} must be {size // 2} numbers, 1 for frequencies that are "
            "kept and then 1e30 for others, got others"
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turned / size,
            "rope_theta": fields.get("rope.freq_base", float, 1e6),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", float, 1e4)},
    }


def _experts_of_gemma4(fields: Fields) -> dict[str, Any]:
    """Return the sizes of experts, none where the file has none."""
    if not fields.get("expert_count", int, 0):
        return {}
    found = mixtures.experts(fields)
    return {"enable_moe_block": True, "top_k_experts": found.pop("num_experts_per_tok"), **found}
