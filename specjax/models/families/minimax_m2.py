"""MiniMax-M2: changes Mixtral by routers of sigmoids, norms of queries and keys, and heads that turn in part."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SigmoidTopK
from specjax.models.families import llama, mixtral, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a MiniMax-M2 checkpoint."""
    config.only("hidden_act", "silu")
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("shared_intermediate_size", 0)
    kinds = config.get("attn_type_list", list, [1])  # 1 is attention by softmax
    if any(kind != 1 for kind in kinds):
        raise ValueError(f"{config.where('attn_type_list')} must have the value 1 for each layer, got {kinds!r}")
    sizes = mixtures.counts(config, "num_local_experts", "num_experts")
    layer = LayerConfig(Attention(has_wide_norms=True), Experts(mixtures.made(config, SigmoidTopK, *sizes)))
    size = config.size("head_dim", 128)
    turned = config.size("rotary_dim", None, most=size)
    factor = 1.0 if turned is None else turned / size
    return llama.decoder(
        config,
        tensors,
        (layer,),
        head_size=size,
        mixture=mixtral.names(tensors),
        expert_size=config.size("intermediate_size"),
        rope=partial(ropes.read, theta=5e6, rotary_factor=factor),
    )
