"""OLMo 1: changes Llama by norms that subtract the mean and have no scale, and maybe by bounds of projections."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMo 1 checkpoint."""
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, bound=config.number("clip_qkv", None))
    mlp = GatedMLP(llama.activation(config, "hidden_act", "silu"))
    return llama.decoder(
        config.replaced(rms_norm_eps=1e-5),
        tensors,
        (LayerConfig(attention, mlp),),
        norms=dict.fromkeys(llama.NORMS),
        outer=llama.OuterNames(norm=None),
        norms_are_centred=True,
    )
