"""Mistral: Llama with a window of attention."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    config.only("hidden_act", "silu")
    return llama.decoder(config, tensors, windows=llama.windows(config, lambda layer: True))
