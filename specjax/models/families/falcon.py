"""Falcon: changes Llama by norms that subtract the mean, and by attention and an MLP without a gate side by side.

They read the output of one norm or of a norm each. A matrix has the queries of each key head, its key and its value
together. Small old releases have layers one by one.
"""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

PREFIX = "transformer."  # in place of "model."
OUTER = llama.OuterNames("word_embeddings", "h", "ln_f")
OF_ATTENTION = llama.AttentionNames("dense", block="self_attention", whole="query_key_value")
OF_MLP = llama.MLPNames(parts=("dense_h_to_4h",), out="dense_4h_to_h")
ONE_NORM = {"attention_norm": "input_layernorm"}
TWO_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Falcon checkpoint."""
    config.only("alibi", False)
    config.only("head_dim", llama.part_of_head(config))
    config.only("n_embed", config.size("hidden_size"))
    config.refuse_null("activation", "multi_query", "parallel_attn")
    is_new = config.get("new_decoder_architecture", bool, False)
    is_parallel, num_norms = _side_by_side(config, is_new)
    bias = config.get("bias", bool, False)
    sizes = {
        "num_key_value_heads": _num_kv_heads(config, is_new),
        "intermediate_size": config.size("ffn_hidden_size", 4 * config.size("hidden_size")),
        "max_position_embeddings": config.size("max_position_embeddings", 2048),
    }
    layer = LayerConfig(
        Attention(has_bias=bias, has_out_bias=bias, by_groups=True),
        MLP(llama.activation(config, "activation", "gelu"), has_bias=bias),
        is_parallel=is_parallel,
        shares_norm=num_norms == 1,
    )
    return llama.decoder(
        llama.with_epsilon(config.replaced(**sizes), "layer_norm_epsilon"),
        tensors.inside(PREFIX),
        (layer,),
        tie_embeddings=True,
        norms=llama.NORMS if not is_parallel else ONE_NORM if num_norms == 1 else TWO_NORMS,
        outer=OUTER,
        attention=OF_ATTENTION,
        mlp=OF_MLP,
        norms_are_centred=True,
        norms_have_biases=True,
    )


def _side_by_side(config: ConfigFile, is_new: bool) -> tuple[bool, int]:
    """Return whether attention and MLP stand side by side, and how many norms they then have."""
    if is_new:
        config.only("parallel_attn", True)
        return True, config.size("num_ln_in_parallel_attn", 2, most=2)
    is_parallel = config.get("parallel_attn", bool, True)
    if is_parallel:
        config.only("num_ln_in_parallel_attn", 1)
    return is_parallel, 1


def _num_kv_heads(config: ConfigFile, is_new: bool) -> int:
    """Return the number of key heads, which old releases have as one or as many as queries."""
    heads = config.size("num_attention_heads")
    if is_new:
        return config.size("num_kv_heads", heads)
    if config.get("multi_query", bool, True):
        return 1
    config.only("num_kv_heads", heads)
    return heads
