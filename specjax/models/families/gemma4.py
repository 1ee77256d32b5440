"""Gemma 4: changes Gemma 3 by larger heads in full layers, by norms of values, and by experts beside the MLP.

In the small releases each token also gives some numbers to every layer, and the last layers attend to the keys and
values of earlier ones. Checkpoints that also take images or audio are read without their tensors.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.models.beside_mlp import BesideMLP
from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts, Gated, SoftmaxTopK
from specjax.models.families import gemma, llama, mixtures, ropes
from specjax.models.families.gemma import ACTIVATIONS, NORMS
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.layer_input import LayerInput
from specjax.models.rope import Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

FULL, SLIDING = ropes.TYPES
UNIFIED = "gemma4_unified"  # how model types begin whose images and sound pass no tower of their own
TURNS: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return the values of fields that a file of a model type may leave out."""
    if model_type.startswith(UNIFIED):
        return {"rope_parameters": TURNS, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
    return {"rope_parameters": TURNS}


@dataclass(frozen=True)
class Parts:
    """The parts of layers, which the drafters of these models have too."""

    types: tuple[str, ...]  # of each layer, one of `ropes.TYPES`
    mixers: dict[str, Attention]  # of each type
    mlp: GatedMLP
    rope: Rope  # how the heads turn whose mixer does not say it


def read_parts(text: ConfigFile) -> Parts:
    """Read the parts of layers from the fields of the language model."""
    if text.fields.get("use_bidirectional_attention") == "vision":
        text.fields["use_bidirectional_attention"] = None  # text is causal
    activation = ACTIVATIONS[text.choice("hidden_activation", tuple(ACTIVATIONS), default="gelu_pytorch_tanh")]
    types = *llama.layer_types(text, lambda i: (i + 1) % 6 != 0)[:-1], FULL  # the last one always attends to all
    _read_layers(text, types)
    sizes = {FULL: text.size("global_head_dim", 512), SLIDING: text.size("head_dim", 256)}
    shares_values = text.get("attention_k_eq_v", bool, False)
    kv_heads = text.size("num_global_key_value_heads", None)
    turns = ropes.read_types(
        text,
        sizes,
        {FULL: 1e6, SLIDING: 1e4},
        rotary_factor=1.0,
        kinds=(*ropes.KINDS, "proportional"),
    )
    shared: dict[str, Any] = {"scale": 1.0, "has_head_norms": True, "has_value_norm": True}
    mixers = {
        FULL: Attention(
            rope=turns[FULL],
            head_size=sizes[FULL],
            num_kv_heads=kv_heads if shares_values else None,
            has_values=not shares_values,
            **shared,
        ),
        SLIDING: Attention(window=text.size("sliding_window", 512), **shared),
    }
    return Parts(types, mixers, GatedMLP(activation), turns[SLIDING])


def _read_layers(text: ConfigFile, types: Sequence[str]) -> None:
    """Set the fields of full layers from the field per_layer_config, which recent versions of transformers write."""
    if "per_layer_config" not in text:
        return
    layers, full = text.table("per_layer_config"), [str(i) for i, kind in enumerate(types) if kind == FULL]
    if set(layers.fields) != set(full) or any(layers.fields[i] != layers.fields[full[0]] for i in full):
        raise ValueError(
            f"{text.where('per_layer_config')} must have the same fields for each layer with full attention, "
            f"{', '.join(full)}, and no other layer, got {reprlib.repr(layers.fields)}"
        )
    layer = layers.table(full[0])
    text.fields["global_head_dim"] = layer.size("head_dim", text.size("head_dim", 256))
    text.fields["num_global_key_value_heads"] = layer.size("num_key_value_heads", None)
    layer.check_all_read()


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Gemma 4 checkpoint."""
    model_type = config.get("model_type", str)
    text, tensors = text_part(config, tensors)
    text = text.with_defaults(**defaults_of(model_type))
    parts, options = read_parts(text), {}
    is_wide = text.get("use_double_wide_mlp", bool, False)
    wide = replace(parts.mlp, size=2 * text.size("intermediate_size")) if is_wide else parts.mlp
    ffns: tuple[Any, Any] = parts.mlp, wide  # of layers with their own keys and values, and of the others
    if text.get("enable_moe_block", bool, False):
        experts = _experts(text, parts.mlp.activation)
        ffns = BesideMLP(parts.mlp, experts), BesideMLP(wide, experts)
        options |= {"expert_size": text.size("moe_intermediate_size"), "mixture": Names()}
    else:
        text.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    lenders, given = _lenders(text, parts.types), _input(text, parts.mlp.activation)
    layers = tuple(
        LayerConfig(
            replace(parts.mixers[kind], keys_of=lender),
            ffns[lender is not None],
            has_post_norms=True,
            has_scale=True,
            input=given,
        )
        for kind, lender in zip(parts.types, lenders, strict=True)
    )
    return gemma.decoder(
        text,
        tensors,
        layers,
        norms=NORMS,
        norm_offset=0.0,
        logit_softcap=text.number("final_logit_softcapping", None),
        rope=parts.rope,
        ignored=(*OTHERS, *_unused(lenders)),
        **options,
    )


def _experts(config: ConfigFile, activation: str) -> Experts:
    sizes = mixtures.counts(config, "num_experts", "num_local_experts", chosen="top_k_experts")
    router = mixtures.made(config, SoftmaxTopK, *sizes, has_scales=True)
    return Experts(router, Gated(activation), has_router_norm=True)


@dataclass(frozen=True)
class Names:
    """The names of the tensors of the MLP and the experts of a layer."""

    def params(self, config: DecoderConfig, ffn: BesideMLP, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of both, as `BesideMLP.shapes` names them."""
        number, hidden = ffn.experts.router.num_experts, config.hidden_size
        norms = {
            "mlp_sum_norm": "post_feedforward_layernorm_1.weight",
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_sum_norm": "post_feedforward_layernorm_2.weight",
            "router_norm": "router.scale",
        }
        params = {param: tensors.vectors({f"{layer}.{name}": hidden}) for param, name in norms.items()}
        return params | {
            **llama.mlp_params(config, ffn.mlp, tensors, layer),
            "router": tensors.table(f"{layer}.router.proj.weight", number, hidden),
            "router_scale": tensors.vectors({f"{layer}.router.per_expert_scale": number}),
            **mixtures.Names().experts(config, number, tensors, layer),
        }


def _input(config: ConfigFile, activation: str) -> LayerInput | None:
    """Return the numbers that tokens give to the layers; None for none."""
    size = config.size("hidden_size_per_layer_input", 256, least=0)
    if not size:
        return None
    vocab_size, found = config.size("vocab_size"), config.size("vocab_size_per_layer_input", 262144)
    if found != vocab_size:
        raise ValueError(f"{config.where('vocab_size_per_layer_input')} must be vocab_size = {vocab_size}, got {found}")
    return LayerInput(size, activation)


def _lenders(config: ConfigFile, types: Sequence[str]) -> list[int | None]:
    """Return for each layer the last earlier one of its type, whose keys and values it has; None for its own."""
    num_own = len(types) - config.size("num_kv_shared_layers", 0, least=0, most=len(types))
    last = {kind: i for i, kind in enumerate(types[:num_own])}
    if missing := [kind for kind in types[num_own:] if kind not in last]:
        raise ValueError(
            f"{config.where('num_kv_shared_layers')} must leave keys and values to a layer of the type {missing[0]}, "
            f"got {len(types) - num_own} of {len(types)} layers"
        )
    return [None if i < num_own else last[kind] for i, kind in enumerate(types)]


def _unused(lenders: Sequence[int | None]) -> list[str]:
    """Return the names of the tensors of keys and values that files have of layers without their own."""
    parts = "k_proj.weight", "v_proj.weight", "k_norm.weight"
    layers = [i for i, lender in enumerate(lenders) if lender is not None]
    return [f"model.layers.{i}.self_attn.{part}" for i in layers for part in parts]
