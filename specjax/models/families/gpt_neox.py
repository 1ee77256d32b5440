"""GPT-NeoX and Pythia: attention and an MLP without a gate side by side, each after another LayerNorm, or one by one.

A matrix has the query, the key and the value of each head together.
"""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

PREFIX = "gpt_neox."  # in place of "model."
OF_ATTENTION = llama.AttentionNames("dense", block="attention", whole="query_key_value")
OF_MLP = llama.MLPNames(parts=("dense_h_to_4h",), out="dense_4h_to_h")
MASKS = "*.attention.bias", "*.attention.masked_bias"  # which old files store


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of GPT-NeoX or Pythia."""
    tensors = tensors.inside(PREFIX)
    config.only("head_dim", llama.part_of_head(config))
    config.only("num_key_value_heads", config.size("num_attention_heads"))
    config.refuse_null("rotary_emb_base", "rotary_pct")
    bias = config.get("attention_bias", bool, True)
    attention = Attention(has_bias=bias, has_out_bias=bias, by_groups=True)
    mlp = MLP(llama.activation(config, "hidden_act", "gelu"), has_bias=True)
    is_parallel = config.get("use_parallel_residual", bool, True)
    turns = {
        "rope_theta": config.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
    }
    return llama.decoder(
        llama.with_epsilon(config.replaced(**turns), "layer_norm_eps"),
        tensors,
        (LayerConfig(attention, mlp, is_parallel=is_parallel, shares_norm=False),),
        outer=llama.OuterNames("embed_in", norm="final_layer_norm", head=_head(tensors)),
        attention=OF_ATTENTION,
        mlp=OF_MLP,
        ignored=MASKS,
        rope=partial(ropes.read, rotary_factor=0.25),
        norms_are_centred=True,
        norms_have_biases=True,
    )


def _head(tensors: Tensors) -> str:
    """Return the name of the head, which most files call an embedding."""
    return "embed_out" if "embed_out.weight" in tensors else "lm_head"
