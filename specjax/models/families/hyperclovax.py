"""HyperCLOVA X: changes Granite by norms after attention and MLP, and by a factor on logits in place of a divisor."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

POST_NORMS = {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a HyperCLOVA X checkpoint."""
    config.only("hidden_act", "silu")
    bias, has_post_norms = config.get("attention_bias", bool, False), config.get("use_post_norm", bool, True)
    factor = config.number("residual_multiplier", 1.0)
    layer = LayerConfig(
        Attention(has_bias=bias, has_out_bias=bias, scale=config.number("attention_multiplier", None)),
        GatedMLP(has_bias=config.get("mlp_bias", bool, False)),
        has_post_norms=has_post_norms,
        mixer_factor=factor,
        ffn_factor=factor,
    )
    return llama.decoder(
        config,
        tensors,
        (layer,),
        norms=llama.NORMS | (POST_NORMS if has_post_norms else {}),
        embedding_factor=config.number("embedding_multiplier", 1.0),
        logit_divisor=1 / config.number("logits_scaling", 1.0),
    )
