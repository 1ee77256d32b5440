"""Qwen2-MoE and Qwen1.5-MoE: change Qwen2 by mixtures of experts beside a gated MLP."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mixtures, qwen2, qwen3_next
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen2-MoE checkpoint."""
    config.only("hidden_act", "silu")
    experts = qwen3_next.mixture(config, is_renormalized=config.get("norm_topk_prob", bool, False))
    layer = LayerConfig(Attention(has_bias=config.get("qkv_bias", bool, True)), experts)
    if config.get("use_sliding_window", bool, False):  # every other one of the first layers, as in transformers
        last = config.get("max_window_layers", int, 28)
        windows = llama.windows(config, lambda i: i % 2 == 0 and i < last)
    else:
        windows = qwen2.windows(config)
    each = llama.windowed(layer, windows)
    return llama.decoder(
        config,
        tensors,
        llama.with_dense(each, GatedMLP(), mixtures.dense_layers(config, len(windows))),
        mixture=qwen3_next.MIXTURE,
        expert_size=config.size("moe_intermediate_size"),
        shared_size=config.size("shared_expert_intermediate_size"),
    )
