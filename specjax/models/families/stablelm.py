"""StableLM: changes Llama by norms that subtract the mean, partial rotary, and maybe attention and MLP side by side.

Large releases also have norms of heads, with a scale for each head and no bias.
"""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

OF_ATTENTION = llama.AttentionNames(query_norm="q_layernorm", key_norm="k_layernorm")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a StableLM checkpoint."""
    config.only("head_dim", llama.part_of_head(config))
    normed = config.get("qk_layernorm", bool, False)
    has_bias = config.get("use_qkv_bias", bool, False)
    attention = Attention(has_bias=has_bias, has_head_norms=normed, norms_by_head=normed)
    is_parallel = config.get("use_parallel_residual", bool, False)
    mlp = GatedMLP(llama.activation(config, "hidden_act", "silu"))
    return llama.decoder(
        llama.with_epsilon(config.with_defaults(num_key_value_heads=32), "layer_norm_eps"),
        tensors,
        (LayerConfig(attention, mlp, is_parallel=is_parallel),),
        norms={name: norm for name, norm in llama.NORMS.items() if name != "mlp_norm" or not is_parallel},
        attention=OF_ATTENTION,
        rope=partial(ropes.read, rotary_factor=0.25),
        norms_are_centred=True,
        norms_have_biases=True,
    )
