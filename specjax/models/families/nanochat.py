"""nanochat: changes Llama by norms without scales, also of embeddings and heads, and by heads that turn backward.

Its MLPs have no gate.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import decoder_model
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.rope import Backward, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

NAMES = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
KINDS = "default", "linear", "llama3"  # of rope; others depend on the length, or change the size of what turns


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a nanochat checkpoint, as transformers has it."""
    config.only("hidden_act", "relu2")
    bias = config.get("attention_bias", bool, False)
    # A norm without a scale does not change what turning does, so that it may come first.
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_unit_norms=True), MLP("relu2"))
    softcap = config.number("final_logit_softcapping", config.unless_null("final_logit_softcapping", 15.0))
    sizes = llama.config_of(
        config,
        (layer,),
        rope=_rope,
        transposed=tensors.on_one_gpu,
        scales_embeddings=True,
        logit_softcap=softcap,
    )
    config.check_computation()
    tensors, hidden = tensors.renamed(NAMES), sizes.hidden_size
    params = llama.outer_params(sizes, tensors, "model.embed_tokens", None)
    params["layers"] = {
        i: {norm: tensors.ones(hidden) for norm in llama.NORMS}
        | llama.layer_params(sizes, layer, tensors, f"model.layers.{i}", norms={})
        for i in range(sizes.num_layers)
    }
    tensors.check_all_read()
    return decoder_model(sizes, params)


def _rope(config: ConfigFile, head_size: int) -> Rope:
    """Return how heads turn."""
    found = ropes.read(config, head_size, kinds=KINDS)
    return replace(found, scaling=Backward(found.scaling))
