"""Phi-3 and Phi-4-mini: change Llama by matrices that are stored together, and by LongRoPE on a part of each head."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

OLD_NAMES = "su", "yarn"  # of LongRoPE, in early files
ORIGINAL_LENGTH = 4096  # positions of the training, where a file does not say them beside the table of rope


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Phi-3 or Phi-4 checkpoint."""
    config.only("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(name, False)
    for name in ("rope_scaling", "rope_parameters"):
        table = config.fields.get(name)
        for key in ("type", "rope_type"):
            if isinstance(table, dict) and table.get(key) in OLD_NAMES:
                table = config.fields[name] = {**table, key: "longrope"}
    if config.fields.get("original_max_position_embeddings") is None:
        config.fields["original_max_position_embeddings"] = ORIGINAL_LENGTH
    window = config.size("sliding_window", None)
    rope = partial(ropes.read, rotary_factor=1.0, kinds=("default", "longrope"))
    return llama.decoder(config, tensors, llama.windowed(LayerConfig(), (window,)), rope=rope)
