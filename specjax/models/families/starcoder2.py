"""StarCoder2: changes Llama by norms that subtract the mean, MLPs without a gate, biases, and maybe windows."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

OF_MLP = llama.MLPNames(parts=("c_fc",), out="c_proj")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a StarCoder2 checkpoint."""
    bias = config.get("use_bias", bool, True)
    attention = Attention(config.size("sliding_window", None), has_bias=bias, has_out_bias=bias)
    mlp = MLP(llama.activation(config, "hidden_act", "gelu_pytorch_tanh"), has_bias=bias)
    return llama.decoder(
        llama.with_epsilon(config.with_defaults(num_key_value_heads=2), "norm_epsilon"),
        tensors,
        (LayerConfig(attention, mlp),),
        tie_embeddings=True,
        mlp=OF_MLP,
        norms_are_centred=True,
        norms_have_biases=True,
    )
