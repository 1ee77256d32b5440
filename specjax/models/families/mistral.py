"""Mistral: changes Llama by a sliding window of attention in all layers."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors, ignored: tuple[str, ...] = ()) -> Model:
    """Build the model of a Mistral checkpoint, or of the text part of one, which ignores tensors by their names."""
    config.only("hidden_act", "silu")
    layers = llama.windowed(LayerConfig(), llama.windows(config, lambda i: True))
    return llama.decoder(config, tensors, layers, ignored=ignored)
