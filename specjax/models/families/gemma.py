"""Gemma: changes Llama by scaled embeddings, norms with scale 1 + weight, a GELU gate, and tied embeddings."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {  # of Gemma 2 and 3
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Gemma checkpoint."""
    # Early checkpoints say gelu for its tanh approximation. transformers does not read hidden_activation here.
    config.choice("hidden_act", ("gelu", "gelu_pytorch_tanh"), default="gelu_pytorch_tanh")
    return decoder(config, tensors, (LayerConfig(ffn=GatedMLP("gelu_tanh")),))


def decoder(
    config: ConfigFile,
    tensors: Tensors,
    layers: tuple[LayerConfig, ...],
    *,
    norm_offset: float = 1.0,
    **options: Any,
) -> Model:
    """Build a model with everything that the releases of Gemma share, given further options of `llama.decoder`."""
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    return llama.decoder(
        config,
        tensors,
        layers,
        head_size=256,
        tie_embeddings=True,
        norm_offset=norm_offset,
        embedding_factor=tensors.rounded(config.size("hidden_size") ** 0.5),
        **options,
    )
