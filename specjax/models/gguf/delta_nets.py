"""Qwen's hybrids in GGUF: gated delta nets whose value heads converters put into another order."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.models.gguf import mixtures
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.places import Place

OF_LAYER = (  # names of tensors of a layer in GGUF and in transformers
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_up_exps", "mlp.experts.*.gate_up_proj"),
    *((f"ffn_{name}_shexp", f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down")),
    *((f"nextn.{name}", f"nextn.{name}") for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")),
)
OF_MTP = {  # names of tensors of the drafter that belong to no layer
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def sizes(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that config.json has for layers of gated delta nets, and for those that attend."""
    of_net, number = fields.recurrent_sizes(), fields.get("nextn_predict_layers", int, 0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - number,
        "mtp_num_hidden_layers": number,
        "full_attention_interval": fields.get("full_attention_interval", int, 4),
        "partial_rotary_factor": fields.get("rope.dimension_count", int, config["head_dim"]) / config["head_dim"],
        "linear_num_key_heads": of_net.num_groups,
        "linear_num_value_heads": of_net.num_heads,
        "linear_key_head_dim": of_net.state_size,
        "linear_value_head_dim": of_net.head_size,
        "linear_conv_kernel_dim": of_net.conv_size,
    }


def qwen3_5(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dense Qwen3.5."""
    return {"model_type": "qwen3_5_text", **sizes(fields, config)}


def qwen3_5_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Qwen3-Next, and of Qwen3.5 with experts."""
    fields.only("expert_weights_norm", True)
    return {
        **sizes(fields, config),
        **mixtures.experts(fields),
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length", int),
    }


def in_order(name: str, place: Place, config: dict[str, Any], *, is_tiled: bool) -> Iterator[tuple[str, Place]]:
    """Return the tensors of transformers that a tensor of a file holds, by name.

    Args:
        name: in transformers, but for the layers of the drafter.
        place: of the tensor.
        config: the fields of `sizes`.
        is_tiled: whether value heads that share a key head stand as far apart as there are key heads.
    """
    layer, part = _split(name)
    last = config["num_hidden_layers"]
    if layer is not None and layer >= last:
        kind, _, ending = part.rpartition(".")
        name = f"mtp.{OF_MTP[kind]}.{ending}" if kind in OF_MTP else f"mtp.layers.{layer - last}.{part}"
    entry, (key_heads, heads) = place.entry, (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    order = np.arange(heads)
    if is_tiled:
        order = order.reshape(-1, key_heads).T.ravel()
    width, keys = config["linear_value_head_dim"], 2 * key_heads * config["linear_key_head_dim"]
    of_values = (order[:, None] * width + np.arange(width)).ravel()
    part = part.removesuffix(".weight")
    if part in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        place = replace(place, rows=np.concatenate([np.arange(keys), keys + of_values]))
        if part.endswith("conv1d") and len(entry.shape) == 2:
            place = replace(place, own_shape=(entry.shape[0], 1, entry.shape[1]))
    elif part == "linear_attn.in_proj_z":
        place = replace(place, rows=of_values)
    elif part in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.dt_bias"):
        place = replace(place, rows=order)
    elif part == "linear_attn.A_log":
        place = replace(place, rows=order, change=lambda decay: np.log(-decay))
    elif part == "linear_attn.out_proj":
        place = replace(place, blocks=order)
    elif part == "linear_attn.norm":
        place = replace(place, change=None)
    elif part == "mlp.shared_expert_gate" and len(entry.shape) == 1:
        place = replace(place, own_shape=(1, entry.shape[-1]))
    elif part == "linear_attn.in_proj_ba":
        if entry.shape[0] != 2 * heads:
            raise ValueError(f"tensor {entry.name} in {entry.path} must have {2 * heads} rows, got {entry.shape[0]}")
        # For each key head, the rows of the first rate and of the second one.
        of_rates = np.arange(2 * heads).reshape(key_heads, 2, -1)
        for i, rate in enumerate("ba"):
            rows = of_rates[:, i].ravel()
            yield name.replace("_ba.", f"_{rate}."), replace(place, own_shape=(heads, entry.shape[1]), rows=rows)
        return
    yield name, place


def _split(name: str) -> tuple[int | None, str]:
    """Return the layer of a tensor, None where it has none, and its name in the layer."""
    start, _, rest = name.removeprefix("model.layers.").partition(".")
    return (int(start), rest) if name.startswith("model.layers.") and start.isdecimal() else (None, name)
