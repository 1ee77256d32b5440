"""Granite 3 and 4: change Llama by factors on embeddings, scores, the outputs of sublayers, and logits.

Some releases of Granite 3 have experts. Granite 4.0 may have layers of Mamba-2, and experts beside an MLP. Granite
Swash has sinks of attention, windows in most layers, and a base of rotary positions for each layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.models.config_file import MAX_NUMBER, ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.rope import NO_ROPE, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

ATTENDS, RECURS = {"attention", "full_attention"}, {"mamba", "linear_attention"}  # kinds of layers
INFINITE = {"__float__": "Infinity"}, 1e30  # as transformers 5 and other tools write it where JSON has no word for it
# The MLP of Granite 4.0 has the name of the one that stands beside the experts of its larger releases.
SHARED_MLP = llama.MLPNames("shared_mlp", whole="input_linear", out="output_linear")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense Granite checkpoint."""
    return _decoder(config, tensors, [_attention(config)], _mlp(config))


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Granite 3 with experts, and with an MLP beside them where the file has one."""
    ffn, options = _experts(config, config.size("shared_intermediate_size", 0, least=0))
    return _decoder(config, tensors, [_attention(config)], ffn, **options)


def build_swash(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense checkpoint of Granite Swash."""
    return _decoder(config, tensors, _mixers(config), _mlp(config), tie_embeddings=True)


def build_swash_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Granite Swash with experts, and with an MLP beside them where it has one."""
    ffn, options = _experts(config, config.size("shared_intermediate_size", 0, least=0))
    return _decoder(config, tensors, _mixers(config), ffn, **options)


def build_hybrid(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Granite 4.0 checkpoint: with layers of Mamba-2 and experts, with one of both, or neither."""
    size = config.size("shared_intermediate_size", 1024)
    ffn, options = GatedMLP(), {}
    if config.get("num_local_experts", int, 8):
        ffn, options = _experts(config, size)
    else:
        config = config.replaced(intermediate_size=size)
        config.ignore("num_local_experts", "num_experts_per_tok", *mixtures.TRAINING)
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    kinds = config.strings("layer_types", config.strings("layers_block_type", []))
    if len(kinds) != number or not set(kinds) <= ATTENDS | RECURS or not set(kinds) & ATTENDS:
        raise ValueError(
            f"{config.where('layer_types')} must be {number} times 'mamba' or 'attention', the latter at least once, "
            f"got {kinds!r}"
        )
    mixers: list[Attention | Mamba2] = [_attention(config)]
    if set(kinds) & RECURS:
        recurrent, attention = mamba(config), mixers[0]
        mixers = [recurrent if kind in RECURS else attention for kind in kinds]
    if config.choice("position_embedding_type", ("rope", "nope"), default="nope") == "nope":
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        options["rope"] = NO_ROPE
    return _decoder(config, tensors, mixers, ffn, mlp=SHARED_MLP, **options)


def _mlp(config: ConfigFile) -> GatedMLP:
    """Return the MLP of dense models."""
    return GatedMLP(has_bias=config.get("mlp_bias", bool, False))


def _attention(config: ConfigFile) -> Attention:
    """Return the mixer of the layers that attend."""
    bias = config.get("attention_bias", bool, False)
    return Attention(has_bias=bias, has_out_bias=bias, scale=config.number("attention_multiplier", 1.0))


def _mixers(config: ConfigFile) -> list[Attention]:
    """Return the mixer of each layer of Granite Swash."""
    config.refuse_null("sliding_window")
    windows = llama.windows(config, lambda i: i % 4 != 0, 128)
    mixers = [replace(_attention(config), window=window, has_sinks=True) for window in windows]
    thetas = config.get("layer_rope_theta", list, None)
    if thetas is None:
        return mixers
    if len(thetas) != len(mixers) or not all(type(x) in (int, float) and 0 <= x < MAX_NUMBER for x in thetas):
        raise ValueError(
            f"{config.where('layer_rope_theta')} must be {len(mixers)} numbers, each 0 or positive, got {thetas!r}"
        )
    turns = {theta: _rope(config, theta) if theta else NO_ROPE for theta in set(thetas)}
    return [replace(mixer, rope=turns[theta]) for mixer, theta in zip(mixers, thetas, strict=True)]


def _rope(config: ConfigFile, theta: float) -> Rope:
    """Return how heads turn by a base in place of the one that config.json has for all layers."""
    tables = {name: config.fields.get(name) for name in ("rope_parameters", "rope_scaling")}
    own = {name: table | {"rope_theta": theta} for name, table in tables.items() if isinstance(table, dict)}
    return ropes.read(config.replaced(rope_theta=theta, **own), llama.size_of_head(config))


def _experts(config: ConfigFile, shared_size: int) -> tuple[Experts, dict[str, Any]]:
    """Return a mixture beside an MLP of some width, none where it is 0, and the options of `llama.decoder` for it."""
    router = mixtures.made(config, SoftmaxTopK, *mixtures.counts(config, "num_local_experts"))
    sizes = {"expert_size": config.size("intermediate_size"), "shared_size": shared_size}
    return Experts(router, shared=Shared() if shared_size else None), {**sizes, "mixture": _MixtureNames()}


def mamba(config: ConfigFile, width: int | None = None) -> Mamba2:
    """Return the mixer of the recurrent layers, given the numbers of all heads; None is as mamba_expand says."""
    heads, groups = config.size("mamba_n_heads", 128), config.size("mamba_n_groups", 1)
    width = config.size("mamba_expand", 2) * config.size("hidden_size") if width is None else width
    if width % heads or heads % groups:
        raise ValueError(
            f"{config.where('mamba_n_heads')} must divide the width of Mamba-2 = {width} and be a multiple of "
            f"mamba_n_groups = {groups}, got {heads}"
        )
    if config.fields.get("mamba_d_head", "auto") != "auto":
        config.only("mamba_d_head", width // heads)
    check_steps(config)
    has_bias = config.get("mamba_proj_bias", bool, False)
    return Mamba2(
        num_key_heads=groups,
        num_value_heads=heads,
        key_size=config.size("mamba_d_state", 256),
        value_size=width // heads,
        conv_size=config.size("mamba_d_conv", 4),
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_conv_bias=config.get("mamba_conv_bias", bool, True),
    )


def check_steps(config: ConfigFile) -> None:
    """Raise ValueError where the times of the steps of Mamba-2 have limits."""
    limit = config.get("time_step_limit", list, [0.0, math.inf])
    if len(limit) != 2 or limit[0] != 0 or limit[1] not in (math.inf, *INFINITE):
        raise ValueError(
            f"{config.where('time_step_limit')} must be {[0.0, math.inf]}, because steps have no limits, got {limit}"
        )


@dataclass(frozen=True)
class _MixtureNames:
    """The names of the tensors of experts, and of the MLP beside them."""

    def params(self, config: DecoderConfig, ffn: Experts, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of a mixture, as `Experts.shapes` names them."""
        block, number = f"{layer}.block_sparse_moe", ffn.router.num_experts
        hidden, size = config.hidden_size, config.expert_size
        if f"{block}.input_linear.weight" in tensors:
            params = {
                "experts_gate_up": tensors.stacked(f"{block}.input_linear.weight", number, 2 * size, hidden),
                "experts_out": tensors.stacked(f"{block}.output_linear.weight", number, hidden, size),
            }
        else:  # in GGUF, and of Granite Swash
            params = mixtures.Names(gate="w1", up="w3", down="w2").experts(config, number, tensors, block)
        router = f"{block}.router.weight"
        router = router if router in tensors else f"{block}.router.layer.weight"
        params["router"] = tensors.table(router, number, hidden)
        if ffn.shared is None:
            return params
        beside = llama.mlp_params(config, GatedMLP(size=config.shared_size), tensors, layer, SHARED_MLP)
        return params | {"shared_gate_up": beside["gate_up"], "shared_out": beside["mlp_out"]}


def _decoder(
    config: ConfigFile,
    tensors: Tensors,
    mixers: Sequence[Attention | Mamba2],
    ffn: GatedMLP | Experts,
    **options: Any,
) -> Model:
    """Build the model, given the mixer of each layer or one of all layers, and more options of `llama.decoder`."""
    config.only("hidden_act", "silu")
    factor = config.number("residual_multiplier", 1.0)
    return llama.decoder(
        config,
        tensors,
        tuple(LayerConfig(mixer, ffn, mixer_factor=factor, ffn_factor=factor) for mixer in mixers),
        embedding_factor=config.number("embedding_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
        **options,
    )
