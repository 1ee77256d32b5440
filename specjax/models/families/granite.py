"""Granite 3 and 4: change Llama by factors on embeddings, scores, the outputs of sublayers, and logits."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.rope import NO_ROPE, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

# The MLP of Granite 4.0 has the name of the one that stands beside the experts of its larger releases.
SHARED_MLP = llama.MLPNames("shared_mlp", whole="input_linear", out="output_linear")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense Granite checkpoint."""
    return _decoder(config, tensors, None, has_bias=config.get("mlp_bias", bool, False))


def build_hybrid(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Granite 4.0 checkpoint that has neither experts nor recurrent layers."""
    size = config.size("shared_intermediate_size", 1024)
    config = ConfigFile(config.path, config.fields | {"intermediate_size": size})
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    kinds = config.get("layer_types", list, config.get("layers_block_type", list, []))
    if len(kinds) != number or not set(kinds) <= {"attention", "full_attention"}:
        raise ValueError(
            f"{config.where('layer_types')} must be {number} times 'attention', because specjax has no Mamba layers, "
            f"got {kinds!r}"
        )
    if config.get("num_local_experts", int, 8) != 0:
        raise ValueError(
            f"{config.where('num_local_experts')} must be 0, because specjax does not have the experts of Granite, got "
            f"{config.get('num_local_experts', int, 8)}"
        )
    config.ignore("num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")  # there are no experts
    turns = config.choice("position_embedding_type", ("rope", "nope"), default="nope") == "rope"
    return _decoder(config, tensors, None if turns else NO_ROPE, mlp=SHARED_MLP)


def _decoder(
    config: ConfigFile, tensors: Tensors, rope: Rope | None, *, has_bias: bool = False, **options: Any
) -> Model:
    """Build the model, given the rotation of its layers, where it is not as config.json says."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    scale = config.number("attention_multiplier", 1.0)
    layer = LayerConfig(
        Attention(has_bias=bias, has_out_bias=bias, scale=scale, rope=rope),
        GatedMLP(has_bias=has_bias),
        residual_factor=config.number("residual_multiplier", 1.0),
    )
    return llama.decoder(
        config,
        tensors,
        (layer,),
        embedding_factor=config.number("embedding_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
        **options,
    )
