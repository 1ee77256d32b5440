"""Qwen2 and Qwen2.5: change Llama by biases of query, key and value, and optional windows in the later layers."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen2 or Qwen2.5 checkpoint."""
    config.only("hidden_act", "silu")
    return llama.decoder(config, tensors, qkv_bias=True, windows=windows(config))


def windows(config: ConfigFile) -> tuple[int | None, ...] | None:
    """Return the window of each layer from the fields of Qwen2 and Qwen3; None if no layer has a window."""
    if not config.get("use_sliding_window", bool, False):
        config.ignore("sliding_window")  # released checkpoints have the field although they do not use it
        return None
    first = config.get("max_window_layers", int, 28)
    return llama.windows(config, lambda layer: layer >= first)
