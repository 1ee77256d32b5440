"""Qwen3-Next, and the parts that Qwen3.5 has, too: gated delta nets in most layers, gated attention in the others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.delta_net import DeltaNet
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

MTP_LAYERS = "mtp.*"  # names of the tensors of the drafter
MIXTURE = mixtures.Names(shared="shared_expert")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen3-Next checkpoint, without its layers for multi-token prediction."""
    experts = mixture(config, is_renormalized=config.get("norm_topk_prob", bool, True))
    each = layers(config, experts, by_heads=True)
    each = llama.with_dense(each, GatedMLP(), mixtures.dense_layers(config, len(each)))
    return decoder(config, tensors, each, (MTP_LAYERS,))


def mixture(config: ConfigFile, *, is_renormalized: bool = True) -> Experts:
    """Return the mixture of experts beside a gated MLP that every token passes through."""
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    router = mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=is_renormalized)
    return Experts(router, shared=Shared(is_gated=True))


def attention(config: ConfigFile) -> Attention:
    """Return the mixer of the layers that attend."""
    config.only("attn_output_gate", True)
    bias = config.get("attention_bias", bool, False)
    return Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True, has_gate=True)


def layers(config: ConfigFile, ffn: GatedMLP | Experts, *, by_heads: bool = False) -> tuple[LayerConfig, ...]:
    """Return the description of each layer; `by_heads` is as `DeltaNet` takes it."""
    config.only("hidden_act", "silu")
    config.choice("output_gate_type", ("silu", "swish"), "silu")  # two names of the gate of the norm of a delta net
    attends = attention(config)
    recurs = delta_net(config, by_heads=by_heads)
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    interval = config.size("full_attention_interval", 4)
    types = kinds(config, [(i + 1) % interval == 0 for i in range(number)])
    return tuple(LayerConfig(attends if kind == "full_attention" else recurs, ffn) for kind in types)


def delta_net(
    config: ConfigFile, heads: tuple[int, int] = (16, 32), sizes: tuple[int, int] = (128, 128), **options: Any
) -> DeltaNet:
    """Return the mixer of the recurrent layers.

    Args:
        config: config.json.
        heads: the defaults of the numbers of key heads and value heads.
        sizes: the defaults of their sizes.
        options: further fields of `DeltaNet`.
    """
    key_heads, value_heads = (
        config.size(f"linear_num_{kind}_heads", number) for kind, number in zip(("key", "value"), heads, strict=True)
    )
    if value_heads % key_heads:
        raise ValueError(
            f"{config.where('linear_num_value_heads')} must be a multiple of linear_num_key_heads = {key_heads}, "
            f"got {value_heads}"
        )
    return DeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=config.size("linear_key_head_dim", sizes[0]),
        value_size=config.size("linear_value_head_dim", sizes[1]),
        conv_size=config.size("linear_conv_kernel_dim", 4),
        **options,
    )


def kinds(config: ConfigFile, attends: Sequence[bool]) -> list[str]:
    """Return the kind of each layer; `attends` says which ones attend in the absence of layer_types."""
    number, default = len(attends), ["full_attention" if one else "linear_attention" for one in attends]
    types = config.strings("layer_types", default)
    if len(types) != number or not {"full_attention"} <= set(types) <= {"full_attention", "linear_attention"}:
        raise ValueError(
            f"{config.where('layer_types')} must be {number} times 'full_attention' or 'linear_attention', the first "
            f"at least once, got {types!r}"
        )
    return types


def decoder(config: ConfigFile, tensors: Tensors, each: tuple[LayerConfig, ...], ignored: tuple[str, ...]) -> Model:
    """Build the model, given the description of each layer and patterns of the names of tensors without use."""
    mixture = MIXTURE if has_experts(each) else None
    return llama.decoder(config, tensors, each, ignored=ignored, mixture=mixture, **options(config, each))


def options(config: ConfigFile, each: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Return the options of `llama.config_of` for these layers."""
    found: dict[str, Any] = {"head_size": 256, "norm_offset": 1.0, "rope": partial(ropes.read, rotary_factor=0.25)}
    if has_experts(each):
        found["expert_size"] = config.size("moe_intermediate_size", 512)
        found["shared_size"] = config.size("shared_expert_intermediate_size", 512)
    return found


def has_experts(each: tuple[LayerConfig, ...]) -> bool:
    """Return whether one of these layers has experts."""
    return any(isinstance(layer.ffn, Experts) for layer in each)
