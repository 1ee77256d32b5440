"""Granite 3 and 4: change Llama by factors on embeddings, scores, the outputs of sublayers, and logits.

Some releases of Granite 3 have experts. Granite 4.0 may have layers of Mamba-2, and experts beside an MLP.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import llama, mixtures
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model

ATTENDS, RECURS = {"attention", "full_attention"}, {"mamba", "linear_attention"}  # kinds of layers
INFINITE = {"__float__": "Infinity"}, 1e30  # as transformers 5 and other tools write it where JSON has no word for it
# The MLP of Granite 4.0 has the name of the one that stands beside the experts of its larger releases.
SHARED_MLP = llama.MLPNames("shared_mlp", whole="input_linear", out="output_linear")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense Granite checkpoint."""
    return _decoder(config, tensors, True, GatedMLP(has_bias=config.get("mlp_bias", bool, False)))


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Granite 3 with experts, and with an MLP beside them where the file has one."""
    size = config.size("shared_intermediate_size", 0, least=0)
    ffn, options = _experts(config, size)
    return _decoder(config, tensors, True, ffn, **options)


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
    recurs = [i for i, kind in enumerate(kinds) if kind in RECURS]
    turns = config.choice("position_embedding_type", ("rope", "nope"), default="nope") == "rope"
    return _decoder(config, tensors, turns, ffn, recurs, mlp=SHARED_MLP, **options)


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
            gate_up = tensors.stacked(f"{block}.input_linear.weight", number, 2 * size, hidden)
            out = tensors.stacked(f"{block}.output_linear.weight", number, hidden, size)
        else:  # in GGUF
            each = [f"{block}.experts.{i}" for i in range(number)]
            gate_up = tensors.stack(hidden, [{f"{one}.w1.weight": size, f"{one}.w3.weight": size} for one in each])
            out = tensors.stack(size, [{f"{one}.w2.weight": hidden} for one in each])
        router = tensors.table(f"{block}.router.layer.weight", number, hidden)
        params = {"router": router, "experts_gate_up": gate_up, "experts_out": out}
        if ffn.shared is None:
            return params
        beside = llama.mlp_params(config, GatedMLP(size=config.shared_size), tensors, layer, SHARED_MLP)
        return params | {"shared_gate_up": beside["gate_up"], "shared_out": beside["mlp_out"]}


def _decoder(
    config: ConfigFile,
    tensors: Tensors,
    turns: bool,
    ffn: GatedMLP | Experts,
    recurs: Sequence[int] = (),
    **options: Any,
) -> Model:
    """Build the model.

    Args:
        config: config.json.
        tensors: the tensors.
        turns: whether queries and keys turn, as config.json says it.
        ffn: of all layers.
        recurs: the layers of Mamba-2.
        options: further ones of `llama.decoder`.
    """
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    scale = config.number("attention_multiplier", 1.0)
    factor = config.number("residual_multiplier", 1.0)
    attention = Attention(has_bias=bias, has_out_bias=bias, scale=scale)
    layer = LayerConfig(attention, ffn, mixer_factor=factor, ffn_factor=factor)
    layers = (layer,)
    if recurs:
        layers *= config.size("num_hidden_layers")
        recurrent = replace(layer, mixer=mamba(config))
        layers = tuple(recurrent if i in recurs else one for i, one in enumerate(layers))
    if not turns:
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        options["rope"] = NO_ROPE
    return llama.decoder(
        config,
        tensors,
        layers,
        embedding_factor=config.number("embedding_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
        **options,
    )
