"""Mellum 2: changes Qwen3-MoE by layers that attend inside a window, and by their own rotary positions."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

THETAS = {"full_attention": 5e5, "sliding_attention": 1e4}
ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()}
HEAD_SIZE = 128
MTP_LAYERS = "mtp.*"  # names of the tensors of the drafter
OF_MTP = "num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Mellum 2 checkpoint, without its layer for multi-token prediction."""
    config.only("hidden_act", "silu")
    config.ignore(*OF_MTP)
    types = llama.layer_types(config, lambda i: False)
    config = config.with_defaults(mlp_layer_types=["sparse"] * len(types), rope_parameters=ROPES)
    sizes = dict.fromkeys(THETAS, llama.size_of_head(config, HEAD_SIZE))
    turns = ropes.read_types(config, sizes, THETAS)
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True)
    mixers = llama.mixers_by_type(config, attention, types, turns, 1024)
    router = mixtures.made(
        config,
        SoftmaxTopK,
        *mixtures.counts(config, "num_experts", "num_local_experts"),
        is_renormalized=config.get("norm_topk_prob", bool, True),
    )
    experts = mixtures.by_types(config, LayerConfig(ffn=Experts(router)))
    experts = experts if len(experts) > 1 else experts * len(types)
    return llama.decoder(
        config,
        tensors,
        tuple(replace(layer, mixer=mixers[kind]) for layer, kind in zip(experts, types, strict=True)),
        head_size=HEAD_SIZE,
        ignored=(MTP_LAYERS,),
        mixture=mixtures.Names(),
        expert_size=config.size("moe_intermediate_size"),
        rope=turns["full_attention"],
    )
