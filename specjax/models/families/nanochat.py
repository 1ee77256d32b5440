"""nanochat: changes Llama by norms without scales, also of embeddings and heads, and by heads that turn backward.

Its MLPs have no gate.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.rope import Backward, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

OUTER = llama.OuterNames(norm=None)
NORMS = dict.fromkeys(llama.NORMS)
OF_MLP = llama.MLPNames(parts=("fc1",), out="fc2")
KINDS = "default", "linear", "llama3"  # of rope; others depend on the length, or change the size of what turns


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a nanochat checkpoint, as transformers has it."""
    config.only("hidden_act", "relu2")
    bias = config.get("attention_bias", bool, False)
    # A norm without a scale does not change what turning does, so that it may come first.
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_unit_norms=True), MLP("relu2"))
    return llama.decoder(
        config,
        tensors,
        (layer,),
        norms=NORMS,
        outer=OUTER,
        mlp=OF_MLP,
        rope=_rope,
        scales_embeddings=True,
        logit_softcap=config.number("final_logit_softcapping", config.unless_null("final_logit_softcapping", 15.0)),
    )


def _rope(config: ConfigFile, head_size: int) -> Rope:
    """Return how heads turn."""
    found = ropes.read(config, head_size, kinds=KINDS)
    return replace(found, scaling=Backward(found.scaling))
