"""Attention on latents in GGUF: DeepSeek, Kimi K2, GLM-4.7-Flash and Mistral 4, whose last matrix converters part."""

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
    ("ffn_gate_up_exps", "mlp.experts.*.gate_up_proj"),
    *mixtures.OF_SHARED,
    *mixtures.OF_NEXTN,
)
BETA_OF_MISTRAL4 = 0.1  # how its queries are scaled by position, which files do not say


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
        if place.scale is not None or (other is not None and other.scale is not None):
            raise ValueError(f"tensor {place.entry.name} in {place.entry.path} must have no scale, got one")
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
    """Return more fields of config.json of DeepSeek V3, Kimi K2 and GLM-4.7-Flash.

    Routers without corrections are of softmax. DeepSeek V2 Lite and Mistral Large 3 have such routers.
    """
    number = fields.get("nextn_predict_layers", int, 0)
    config = config | {"num_hidden_layers": config["num_hidden_layers"] - number}
    if f"blk.{config['num_hidden_layers'] - 1}.exp_probs_b.bias" not in fields.header.tensors:
        return _of_softmax(fields, config, 0.0)
    fields.only("expert_gating_func", 2)  # sigmoids
    return {
        **sizes(fields, config),
        **_experts(fields),
        "model_type": "deepseek_v3",
        "num_hidden_layers": config["num_hidden_layers"],
        "num_nextn_predict_layers": number,
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
    }


def mistral4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Mistral Small 4."""
    return _of_softmax(fields, config, BETA_OF_MISTRAL4)


def _of_softmax(fields: Fields, config: dict[str, Any], beta: float) -> dict[str, Any]:
    """Return more fields of config.json of a model whose routers are of softmax.

    Args:
        fields: of the file.
        config: the fields of config.json so far.
        beta: how queries are scaled by position where the file does not say it.
    """
    fields.only("expert_gating_func", 1)  # softmax
    found = sizes(fields, config)
    table = found.pop("rope_scaling") or {"rope_type": "default"}
    length = table.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        **found,
        **_experts(fields),
        "model_type": "mistral4",
        "rope_scaling": None,
        "rope_parameters": table
        | {
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": fields.get("attention.temperature_scale", float, beta),
            "original_max_position_embeddings": fields.get("attention.temperature_length", int, length),
        },
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0) or 1.0,  # 0 is none
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
    }


def _experts(fields: Fields) -> dict[str, Any]:
    """Return the numbers and sizes of experts, and of their groups."""
    return {
        **mixtures.experts(fields, "n_routed_experts"),
        "n_shared_experts": fields.get("expert_shared_count", int),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
    }
