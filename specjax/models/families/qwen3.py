"""Qwen3: changes Llama by an RMSNorm of each query and key head, and optional windows as in Qwen2."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, qwen2
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen3 checkpoint."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    return llama.decoder(
        config,
        tensors,
        head_size=128,
        head_norms=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        windows=qwen2.windows(config),
    )
