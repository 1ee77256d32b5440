"""OLMo 2: changes Llama by norms after attention and MLP in place of those before, and by norms of queries and keys."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMo 2 checkpoint."""
    return llama.decoder(config, tensors, (layer(config),), norms=NORMS)


def layer(config: ConfigFile) -> LayerConfig:
    """Return the description of a layer without a window."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_wide_norms=True)
    return LayerConfig(attention, has_norms=False, has_post_norms=True)
