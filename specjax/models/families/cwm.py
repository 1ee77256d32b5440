"""Code World Model: changes Llama by windows in all layers but every fourth."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

ROPE = {  # of files without a table
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of the Code World Model."""
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    if "rope_parameters" not in config:
        config = config.with_defaults(rope_scaling=ROPE)
    layer = LayerConfig(Attention(), GatedMLP(has_bias=config.get("mlp_bias", bool, False)))
    layers = llama.windowed(layer, llama.windows(config, lambda i: i % 4 != 0, 8192))
    return llama.decoder(config, tensors, layers, head_size=128, rope=partial(ropes.read, theta=1e6))
