"""Nemotron-3 and -4, and Minitron: change Llama by norms that subtract the mean, and by MLPs without a gate.

The scales of norms lack 1 in the files, as Gemma's do, and a part of each head turns.
"""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Nemotron or Minitron."""
    bias = config.get("attention_bias", bool, False)
    activation, mlp_bias = llama.activation(config, "hidden_act", "relu2"), config.get("mlp_bias", bool, False)
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias), MLP(activation, has_bias=mlp_bias))
    return llama.decoder(
        llama.with_epsilon(config, "norm_eps"),
        tensors,
        (layer,),
        rope=partial(ropes.read, rotary_factor=0.5),
        norm_offset=1.0,
        norms_are_centred=True,
        norms_have_biases=True,
    )
