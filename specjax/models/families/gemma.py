"""Gemma: Llama with a scaled embedding, norms around 1 + scale, and GELU."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    return decoder(config, tensors)


def decoder(config: ConfigFile, tensors: Tensors, **options: Any) -> Model:
    """A model with what Gemma and Gemma 2 share."""
    for name in ("hidden_act", "hidden_activation"):  # the first releases say gelu and mean its tanh approximation
        config.choice(name, ("gelu", "gelu_pytorch_tanh"), default="gelu_pytorch_tanh")
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    return llama.decoder(
        config,
        tensors,
        head_size=256,
        tie_embeddings=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        scale_embedding=True,
        **options,
    )
