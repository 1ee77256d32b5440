"""Hunyuan 3: changes Qwen3 by a router of sigmoids, by a shared MLP, and by experts in all layers but the first."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SigmoidTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

HEAD_SIZE = 128
AS_HERE = {  # fields that say how all models of this type are
    "hidden_act": "silu",
    "mlp_bias": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "qk_norm": True,
    "route_norm": True,
}
RELEASED = mixtures.Names(router="router.gate", shared="shared_mlp", correction="expert_bias")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Hunyuan 3, without its layers for multi-token prediction."""
    for name, value in AS_HERE.items():
        config.only(name, value)
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    router = SigmoidTopK(*sizes, scale=config.number("router_scaling_factor", 2.826))
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True)
    layers = mixtures.by_types(config, LayerConfig(attention, Experts(router, shared=Shared())))
    size = config.size("moe_intermediate_size")
    is_released = any(name.endswith(f".{RELEASED.correction}") for name in tensors.names())
    return llama.decoder(
        config,
        tensors,
        layers,
        head_size=HEAD_SIZE,
        mixture=RELEASED if is_released else mixtures.Names(correction="e_score_correction_bias"),
        ignored=mixtures.mtp_layers(config),
        rope=partial(ropes.read, theta=11_158_840.0),
        expert_size=size,
        shared_size=config.size("num_shared_experts", 1, most=mixtures.MAX_EXPERTS) * size,
    )
