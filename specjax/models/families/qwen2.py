"""Qwen2 and Qwen2.5: change Llama by biases of query, key and value, and optional windows in the later layers."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors, **options: Any) -> Model:
    """Build the model of a Qwen2 or Qwen2.5 checkpoint, given further options of `llama.decoder`."""
    config.only("hidden_act", "silu")
    layer = LayerConfig(Attention(has_bias=True))
    return llama.decoder(config, tensors, llama.windowed(layer, windows(config)), **options)


def windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Return the window of each layer from the fields of Qwen2 and Qwen3."""
    if not config.get("use_sliding_window", bool, False):
        config.ignore("sliding_window")  # released checkpoints have the field although they do not use it
        return (None,) * config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    first = config.get("max_window_layers", int, 28)
    return llama.windows(config, lambda i: i >= first)
