"""Gemma 3: changes Gemma 2 by norms of heads, and by another base of rotary positions in the layers with windows.

Checkpoints that also take images are read without the tensors of their images.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import gemma, llama, ropes
from specjax.models.families.gemma import ACTIVATIONS, NORMS
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

# The text part of released checkpoints with images lacks the fields whose values are these.
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Gemma 3 checkpoint."""
    text, tensors = text_part(config, tensors)
    text = text.with_defaults(**DEFAULTS)
    activation = text.choice("hidden_activation", tuple(ACTIVATIONS), default="gelu_pytorch_tanh")
    pattern = text.size("sliding_window_pattern", 6)
    if "layer_types" in text:
        text.ignore("_sliding_window_pattern")
    else:
        text.only("_sliding_window_pattern", 6)  # transformers writes it, and does not read it
    types = llama.layer_types(text, lambda i: (i + 1) % pattern != 0)
    window = text.size("sliding_window", text.unless_null("sliding_window", 4096))
    size = text.size("head_dim", 256)
    turns = ropes.read_types(text, dict.fromkeys(ropes.TYPES, size), THETAS, local="rope_local_base_freq")
    attention = Attention(
        scale=text.number("query_pre_attn_scalar", 256.0) ** -0.5,
        has_head_norms=True,
    )
    mixers = {
        "full_attention": attention,
        "sliding_attention": replace(attention, window=window, rope=turns["sliding_attention"]),
    }
    ffn = GatedMLP(ACTIVATIONS[activation])
    return gemma.decoder(
        text,
        tensors,
        tuple(LayerConfig(mixers[kind], ffn, has_post_norms=True) for kind in types),
        norms=NORMS,
        logit_softcap=text.number("final_logit_softcapping", None),
        rope=turns["full_attention"],
        ignored=OTHERS,
    )
