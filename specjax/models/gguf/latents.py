"""Attention on latents in GGUF: DeepSeek V3, Kimi K2 and GLM-4.7-Flash, whose last matrix converters part in two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.models.gguf import mixtures
from specjax.models.gguf.blocks import floats_of
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.header import Entry, Header
from specjax.models.gguf.places import Place

OF_LAYER = (  # names of tensors of a layer in GGUF and in transformers
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    *((f"ffn_{name}_shexp", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class KeysAndValues:
    """The matrix [heads (key size + value size), rank] that makes keys and values of latents, in two tensors."""

    keys: Entry  # [heads, rank, key size]
    values: Entry  # [heads, value size, rank]
    kind = "F32"
    is_kept = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the matrix has in transformers."""
        heads, rank, size = self.keys.shape
        return heads * (size + self.values.shape[1]), rank

    def floats(self, header: Header, index: tuple) -> np.ndarray:
        """Return a part of the matrix as floats."""
        parts = [floats_of(header.bytes_of(x), x.kind.name).reshape(x.shape) for x in (self.keys, self.values)]
        both = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1, dtype=np.float32)
        return both.reshape(self.shape)[index]


def joined(places: Mapping[str, Place]) -> "dict[str, Place | KeysAndValues]":
    """Return tensors by name, the two parts of a matrix as one.

    Raises:
        ValueError: a part is missing, or the parts do not fit each other.
    """
    found: dict[str, Place | KeysAndValues] = {}
    for name, place in places.items():
        if name.endswith(".self_attn.v_b_proj.weight"):
            continue
        if not name.endswith(".self_attn.k_b_proj.weight"):
            found[name] = place
            continue
        other = places.get(name.replace("k_b_proj", "v_b_proj"))
        keys, values = place.entry, None if other is None else other.entry
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3 or values.shape[::2] != keys.shape[:2]:
            raise ValueError(
                f"tensors {keys.name} and {keys.name.replace('k_b', 'v_b')} in {keys.path} must have shapes [heads, "
                f"rank, key size] and [heads, value size, rank], got {keys.shape} and "
                f"{'none' if values is None else values.shape}"
            )
        found[name.replace("k_b_proj", "kv_b_proj")] = KeysAndValues(keys, values)
    return found


def sizes(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that config.json has for attention on latents."""
    turned = fields.get("rope.dimension_count", int)
    whole = fields.get("attention.key_length_mla", int, fields.get("attention.key_length", int))
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.get("attention.q_lora_rank", int, None),
        "kv_lora_rank": fields.get("attention.kv_lora_rank", int),
        "qk_nope_head_dim": whole - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": fields.get("attention.value_length_mla", int, fields.get("attention.value_length", int)),
        "rope_interleave": True,
        "rope_scaling": _scaling(fields),
    }


def _scaling(fields: Fields) -> dict[str, Any] | None:
    """Return the field rope_scaling."""
    fields.only("rope.scaling.type", "none", "yarn")
    found, gain = fields.yarn(), fields.get("rope.scaling.yarn_log_multiplier", float, None)
    if found is None or gain is None:
        return found
    return found | {"mscale": 10 * gain, "mscale_all_dim": 10 * gain}  # the file has a tenth of both


def deepseek2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of DeepSeek V3, Kimi K2 and GLM-4.7-Flash."""
    fields.only("expert_gating_func", 2)  # sigmoids
    number = config["num_hidden_layers"]
    if f"blk.{number - 1}.exp_probs_b.bias" not in fields.header.tensors:
        raise ValueError(
            f"{fields.header.path} must have routers of sigmoids with corrections, as DeepSeek V3 has them, got none"
        )
    return {
        **sizes(fields, config),
        **mixtures.experts(fields, "n_routed_experts"),
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "n_shared_experts": fields.get("expert_shared_count", int),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
    }
