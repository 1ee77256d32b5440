"""Hybrids of Mamba-2 in GGUF: Granite 4 H, Nemotron-H and Falcon-H1."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.models.gguf import dense
from specjax.models.gguf.fields import Fields, RecurrentSizes
from specjax.models.gguf.names import renamed
from specjax.models.gguf.places import Place

# Tensors of no layer whose names differ from the names of Llama.
WHOLE_OF_NEMOTRON = {"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"}
WHOLE_OF_FALCON = {"model.norm": "model.final_layernorm"}


def _of_mamba(block: str) -> tuple[tuple[str, str], ...]:
    """Return the names of the tensors of Mamba-2 in GGUF and in transformers."""
    return (
        *((f"ssm_{name}", f"{block}.{name}_proj") for name in ("in", "out")),
        ("ssm_conv1d", f"{block}.conv1d"),
        ("ssm_dt.bias", f"{block}.dt_bias"),
        ("ssm_a", f"{block}.A_log"),
        ("ssm_d", f"{block}.D"),
        ("ssm_norm", f"{block}.norm"),
    )


# An MLP stands alone, or beside experts.
OF_GRANITE = (
    *_of_mamba("mamba"),
    *((f"ffn_{name}", f"shared_mlp.{name}_proj") for name in ("gate", "up")),
    *((f"ffn_{name}_shexp", f"shared_mlp.{name}_proj") for name in ("gate", "up")),
    *((name, "shared_mlp.output_linear") for name in ("ffn_down", "ffn_down_shexp")),
    ("ffn_gate_inp", "block_sparse_moe.router.layer"),
)
OF_NEMOTRON = (  # the star stands for the number of an expert
    *_of_mamba("mixer"),
    ("attn_norm", "norm"),
    *((f"attn_{name}", f"mixer.{name}_proj") for name in "qkv"),
    ("attn_output", "mixer.o_proj"),
    *((f"ffn_{name}", f"mixer.{name}_proj") for name in ("up", "down")),
    *((f"ffn_{name}_exps", f"mixer.experts.*.{name}_proj") for name in ("up", "down")),
    *((f"ffn_{name}_shexp", f"mixer.shared_experts.{name}_proj") for name in ("up", "down")),
    ("ffn_gate_inp", "mixer.gate"),
    ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ("ffn_latent_down", "mixer.fc1_latent_proj"),
    ("ffn_latent_up", "mixer.fc2_latent_proj"),
)
OF_FALCON = (
    *_of_mamba("mamba"),
    *((name, "pre_ff_layernorm.weight") for name in ("ffn_norm", "ffn_norm.weight")),  # converters leave the ending out
    *((f"ffn_{name}", f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
)


def _sizes(fields: Fields, of_mamba: RecurrentSizes) -> dict[str, Any]:
    """Return the fields that config.json has for the layers of Mamba-2 of Granite 4 H and Falcon-H1."""
    return {
        "mamba_n_heads": of_mamba.num_heads,
        "mamba_n_groups": of_mamba.num_groups,
        "mamba_d_state": of_mamba.state_size,
        "mamba_d_conv": of_mamba.conv_size,
        "mamba_proj_bias": _has(fields, "ssm_in.bias"),
        "mamba_conv_bias": _has(fields, "ssm_conv1d.bias"),
    }


def falcon_h1(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Falcon-H1, whose factors are in the tensors of the file."""
    of_mamba = fields.recurrent_sizes()
    return {
        "model_type": "falcon_h1",
        **_sizes(fields, of_mamba),
        "mamba_d_ssm": of_mamba.num_heads * of_mamba.head_size,
        "mamba_rms_norm": _has(fields, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": _has(fields, "ffn_down.bias"),
        "projectors_bias": _has(fields, "ssm_out.bias"),
    }


def sizes_of_granite(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that config.json has for the layers and sizes of Granite 4 H."""
    of_mamba, hidden = fields.recurrent_sizes(), config["hidden_size"]
    inner = of_mamba.num_heads * of_mamba.head_size
    if inner % hidden:
        place = f"{fields.architecture}.ssm.inner_size in {fields.header.path}"
        raise ValueError(f"{place} must be a multiple of embedding_length = {hidden}, got {inner}")
    number = config["num_hidden_layers"]
    attends = fields.of_layers("attention.head_count_kv", number, 0)
    return {
        "layer_types": ["attention" if heads else "mamba" for heads in attends],
        "shared_intermediate_size": fields.get("expert_shared_feed_forward_length", int, config["intermediate_size"]),
        "num_local_experts": fields.get("expert_count", int, 0),
        "num_experts_per_tok": fields.get("expert_used_count", int, 0),
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned", bool, True) else "nope",
        **_sizes(fields, of_mamba),
        "mamba_expand": inner // hidden,
    }


def granite_hybrid(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Granite 4 H."""
    return {
        "model_type": "granitemoehybrid",
        **sizes_of_granite(fields, config),
        **dense.factors_of_granite(fields),
    }


def sizes_of_nemotron(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that config.json has for the layers and sizes of Nemotron-H."""
    of_mamba, given = fields.recurrent_sizes(), config["num_hidden_layers"]
    number = given - fields.get("nextn_predict_layers", int, 0)
    attends, widths = (fields.of_layers(name, given) for name in ("attention.head_count_kv", "feed_forward_length"))
    num_experts = fields.get("expert_count", int, 0)
    of_ffn = "E" if num_experts else "-"
    kinds = ["*" if heads else of_ffn if width else "M" for heads, width in zip(attends, widths, strict=True)]
    found = {
        "model_type": "nemotron_h",
        "num_hidden_layers": number,
        "hybrid_override_pattern": "".join(kinds[:number]),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": of_mamba.num_heads,
        "mamba_head_dim": of_mamba.head_size,
        "n_groups": of_mamba.num_groups,
        "ssm_state_size": of_mamba.state_size,
        "conv_kernel": of_mamba.conv_size,
        "use_bias": _has(fields, "ssm_in.bias"),
        "use_conv_bias": _has(fields, "ssm_conv1d.bias"),
    }
    if not num_experts:
        return found
    return found | {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": fields.get("expert_used_count", int),
        "moe_intermediate_size": fields.get("expert_feed_forward_length", int),
        "moe_shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length", int),
        "n_shared_experts": fields.get("expert_shared_count", int, 1),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
        "moe_latent_size": fields.get("moe_latent_size", int, None),
    }


def _has(fields: Fields, name: str) -> bool:
    """Return whether a layer has a tensor."""
    return any(tensor.endswith(f".{name}") for tensor in fields.header.tensors)


def as_vectors(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Return the tensor of transformers that a tensor of a file holds; the drafter's tensors are left out.

    Args:
        name: in transformers; in the file where transformers has no such tensor.
        place: of the tensor.
        config: the fields of config.json.
    """
    layer = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= config["num_hidden_layers"]:
        return
    shape = place.entry.shape
    if name.endswith((".A_log", ".D", ".mixer.norm.weight", ".mamba.norm.weight")):
        place = replace(place, own_shape=(int(np.prod(shape)),))
    if name.endswith(".A_log"):
        place = replace(place, change=lambda decay: np.log(-decay))
    elif name.endswith(".conv1d.weight") and len(shape) == 2:
        place = replace(place, own_shape=(shape[0], 1, shape[1]))
    yield name, place


def as_named(name: str, place: Place, config: dict[str, Any], *, names: dict[str, str]) -> Iterator[tuple[str, Place]]:
    """Return what `as_vectors` does, with other names for tensors of no layer."""
    yield from as_vectors(renamed(name, names), place, config)
