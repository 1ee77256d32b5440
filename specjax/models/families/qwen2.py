"""Qwen2 and 2.5: Llama with biases of query, key and value, and windows in the later layers if asked for."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    config.only("hidden_act", "silu")
    return llama.decoder(config, tensors, qkv_bias=True, windows=windows(config))


def windows(config: ConfigFile) -> tuple[int | None, ...] | None:
    """The window of each layer, from the fields that Qwen2 and Qwen3 have."""
    if not config.get("use_sliding_window", bool, False):
        config.ignore("sliding_window")  # released checkpoints name one all the same
        return None
    first = config.get("max_window_layers", int, 28)
    return llama.windows(config, lambda layer: layer >= first)
