"""Trinity (AFMoE): changes Qwen3-MoE by gates on attention, norms after it and after experts, and windows.

Layers with a window see positions, the others do not.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SigmoidTopK
from specjax.models.families import llama, mixtures
from specjax.models.layer import Attention, GatedMLP, LayerConfig, OutputGate
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
NAMES = mixtures.Names(router="router.gate", correction="expert_bias")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Trinity checkpoint."""
    config.only("hidden_act", "silu")
    config.only("score_func", "sigmoid")
    config.only("route_norm", True)
    for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.only(name, 1)
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True, output_gate=OutputGate("sigmoid"))
    step = config.size("global_attn_every_n_layers", 4)
    types = llama.layer_types(config, lambda i: (i + 1) % step != 0)
    mixers = {
        "full_attention": replace(attention, rope=NO_ROPE),
        "sliding_attention": replace(attention, window=config.size("sliding_window", 1024)),
    }
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    router = mixtures.made(config, SigmoidTopK, *sizes, scale=config.number("route_scale", 1.0))
    layer = LayerConfig(ffn=Experts(router, shared=Shared()), has_post_norms=True)
    num_dense = config.size("num_dense_layers", 1, least=0)
    each = tuple(replace(layer, mixer=mixers[kind]) for kind in types)
    layers = llama.with_dense(each, GatedMLP(), [i < num_dense for i in range(len(types))])
    size, hidden = config.size("moe_intermediate_size", 1408), config.size("hidden_size")
    return llama.decoder(
        config,
        tensors,
        layers,
        head_size=config.unless_null("head_dim", 128),
        norms=NORMS,
        mixture=NAMES,
        expert_size=size,
        shared_size=size * config.size("num_shared_experts", 2, most=mixtures.MAX_EXPERTS),
        embedding_factor=hidden**0.5 if config.get("mup_enabled", bool, False) else 1.0,
    )
