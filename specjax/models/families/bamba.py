"""Bamba: layers of Mamba-2 between some that attend, of whose heads a half turns."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import falcon_h1, granite, llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

TURNED = 0.5  # part of each head that turns where the table of the rotation does not say it


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Bamba checkpoint."""
    config = config.with_defaults(num_key_value_heads=config.unless_null("num_key_value_heads", 8))
    config.only("hidden_act", "silu")
    number, indices = config.size("num_hidden_layers", most=llama.MAX_LAYERS), config.get("attn_layer_indices", list)
    if not all(type(i) is int for i in indices) or not any(i in indices for i in range(number)):
        raise ValueError(
            f"{config.where('attn_layer_indices')} must be integers, one of them at least in [0, {number - 1}], got "
            f"{indices!r}"
        )
    bias, mamba = config.get("attention_bias", bool, False), granite.mamba(config)
    attention, ffn = Attention(has_bias=bias, has_out_bias=bias), GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    return llama.decoder(
        config.replaced(partial_rotary_factor=TURNED),
        tensors,
        tuple(LayerConfig(attention if i in indices else mamba, ffn) for i in range(number)),
        norms=falcon_h1.NORMS,
        mlp=falcon_h1.OF_MLP,
        outer=falcon_h1.OUTER,
        rope=partial(ropes.read, rotary_factor=TURNED),
    )
