"""SmolLM3: changes Llama by layers that do not see positions, which may have windows."""

from dataclasses import replace
from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a SmolLM3 checkpoint."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias)
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    each = turns(config)
    windows: tuple[int | None, ...] = (None,) * len(each)
    if config.get("use_sliding_window", bool, False):
        windows = llama.windows(config, lambda i: not each[i], None)
    else:
        config.ignore("sliding_window")  # it is then not used
    mixers = [
        replace(attention, window=window, rope=None if turn else NO_ROPE)
        for turn, window in zip(each, windows, strict=True)
    ]
    layers = tuple(LayerConfig(mixer, ffn) for mixer in mixers)
    return llama.decoder(config, tensors, layers, tie_embeddings=True, rope=partial(ropes.read, theta=2e6))


def turns(config: ConfigFile) -> list[bool]:
    """Return whether the heads of each layer turn with the position."""
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    interval = config.size("no_rope_layer_interval", 4)
    found = config.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(number)])
    if len(found) < number or not all(type(one) is int and one in (0, 1) for one in found):
        raise ValueError(f"{config.where('no_rope_layers')} must be at least {number} times 0 or 1, got {found!r}")
    return [one == 1 for one in found[:number]]
