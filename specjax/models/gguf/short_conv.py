"""LFM2 in GGUF, dense and with experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specjax.models.gguf.fields import Fields
from specjax.models.gguf.places import Place

OF_LAYER = (
    *((f"shortconv.{name}", f"conv.{name}") for name in ("conv", "in_proj", "out_proj")),
    ("attn_output", "self_attn.out_proj"),
    *((f"attn_{name}_norm", f"self_attn.{name}_layernorm") for name in "qk"),
    ("attn_norm", "operator_norm"),
    ("ffn_norm", "ffn_norm"),
    *((f"ffn_{name}", f"feed_forward.{own}") for name, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    *(
        (f"ffn_{name}_exps", f"feed_forward.experts.*.{own}")
        for name, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
    ("ffn_gate_inp", "feed_forward.gate"),
    ("exp_probs_b.bias", "feed_forward.expert_bias"),
)


def lfm2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dense LFM2."""
    attends = fields.of_layers("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if heads else "conv" for heads in attends],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.get("shortconv.l_cache", int),
        "block_auto_adjust_ff_dim": False,  # the file says the width as it is
    }


def lfm2_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of LFM2 with experts."""
    fields.only("expert_gating_func", 2)  # sigmoids
    return lfm2(fields, config) | {
        "model_type": "lfm2_moe",
        "num_experts": fields.get("expert_count", int),
        "num_experts_per_tok": fields.get("expert_used_count", int),
        "num_dense_layers": fields.get("leading_dense_block_count", int, 0),
        "moe_intermediate_size": fields.get("expert_feed_forward_length", int),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
    }


def in_three_axes(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Return the tensor of transformers that a tensor holds; convolutions lack an axis in the file."""
    shape = place.entry.shape
    if name.endswith(".conv.conv.weight") and len(shape) == 2:
        place = replace(place, own_shape=(shape[0], 1, shape[1]))
    yield name, place
