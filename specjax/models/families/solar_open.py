"""Solar Open: changes GLM-4.5 by experts in every layer, and by heads that turn as a whole."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Solar Open checkpoint."""
    config.only("hidden_act", "silu")
    config.only("use_qk_norm", False)
    config.only("first_k_dense_replace", 0)
    attention = Attention(has_bias=config.get("attention_bias", bool, False))
    return llama.decoder(
        config,
        tensors,
        (LayerConfig(attention, mixtures.sigmoid_experts(config)),),
        head_size=128,
        mixture=mixtures.Names(),
        rope=partial(ropes.read, theta=1e6),
        **mixtures.widths(config),
    )
