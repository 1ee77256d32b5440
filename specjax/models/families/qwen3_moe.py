"""Qwen3-MoE: changes Qwen3 by mixtures of experts in most layers."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.families import llama, mixtures, qwen2
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors, mixture: mixtures.Names | None = None, **options: Any) -> Model:
    """Build the model of a Qwen3-MoE checkpoint, given the names of its experts and more of `llama.decoder`."""
    config.only("hidden_act", "silu")
    config.only("use_qk_norm", True)  # Qwen3-Coder says what all models of this type have
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True)
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    renormalized = config.get("norm_topk_prob", bool, False)
    experts = Experts(mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=renormalized))
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    windows = qwen2.windows(config)
    if config.get("use_sliding_window", bool, False):  # all layers, whatever max_window_layers and layer_types say
        windows = (config.size("sliding_window", config.unless_null("sliding_window", 4096)),) * number
    each = llama.windowed(LayerConfig(attention, experts), windows)
    layers = llama.with_dense(each, GatedMLP(), mixtures.dense_layers(config, number))
    return llama.decoder(
        config,
        tensors,
        layers,
        expert_size=config.size("moe_intermediate_size"),
        mixture=mixture or mixtures.Names(),
        **options,
    )
