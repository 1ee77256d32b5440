"""Qwen3: changes Llama by an RMSNorm of each query and key head, and optional windows as in Qwen2."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, qwen2
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors, **options: Any) -> Model:
    """Build the model of a Qwen3 checkpoint, given further options of `llama.decoder`."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True))
    layers = llama.windowed(layer, qwen2.windows(config))
    return llama.decoder(config, tensors, layers, head_size=128, **options)
