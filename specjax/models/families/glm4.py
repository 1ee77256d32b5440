"""GLM-4: changes Llama by heads that turn in part, whose numbers that turn together stand side by side.

The checkpoints of GLM-4-0414 (`glm4`) have norms after attention and MLP, too; GLM-4-9B (`glm`) has none there. The
checkpoints of GLM-4.1V (`glm4v`) are read without the tensors of images, whose tokens alone have several positions.
"""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
HEAD_SIZE = 128


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a GLM-4-0414 checkpoint."""
    layer = LayerConfig(attention(config), has_post_norms=True)
    return llama.decoder(config, tensors, (layer,), head_size=HEAD_SIZE, norms=NORMS, rope=read_rope)


def build_text(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of the text part of a GLM-4.1V checkpoint."""
    text, tensors = text_part(config, tensors)
    text.only("attention_bias", True)
    layer = LayerConfig(attention(text), has_post_norms=True)
    turns = partial(ropes.read_side_by_side, rotary_factor=1.0)  # without the field whole heads turn here
    return llama.decoder(text, tensors, (layer,), norms=NORMS, rope=turns, ignored=OTHERS)


def build_first(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a GLM-4-9B checkpoint."""
    return llama.decoder(config, tensors, (LayerConfig(attention(config)),), head_size=HEAD_SIZE, rope=read_rope)


def attention(config: ConfigFile) -> Attention:
    """Return the mixer of all layers."""
    config.only("hidden_act", "silu")
    return Attention(has_bias=config.get("attention_bias", bool, True))


read_rope = partial(ropes.read_side_by_side, rotary_factor=0.5)
