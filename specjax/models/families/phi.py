"""Phi-1, Phi-1.5 and Phi-2: change Llama by attention and an MLP without a gate side by side, and by biases everywhere.

Both read the same LayerNorm of the stream, and logits have a bias, too.
"""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

OF_ATTENTION = llama.AttentionNames("dense", "q_layernorm", "k_layernorm")
OF_MLP = llama.MLPNames(parts=("fc1",), out="fc2")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Phi-1, Phi-1.5 or Phi-2."""
    normed = config.get("qk_layernorm", bool, False)
    attention = Attention(has_bias=True, has_out_bias=True, has_head_norms=normed, norms_have_biases=normed)
    mlp = MLP(llama.activation(config, "hidden_act", "gelu_new"), has_bias=True)
    return llama.decoder(
        llama.with_epsilon(config, "layer_norm_eps"),
        tensors,
        (LayerConfig(attention, mlp, is_parallel=True),),
        norms={"attention_norm": "input_layernorm"},
        outer=llama.OuterNames(norm="final_layernorm"),
        attention=OF_ATTENTION,
        mlp=OF_MLP,
        rope=partial(ropes.read, rotary_factor=0.5),
        norms_are_centred=True,
        norms_have_biases=True,
        head_has_bias=True,
    )
