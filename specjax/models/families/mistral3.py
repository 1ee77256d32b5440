"""Mistral Small 3.1 and later, and Ministral 3: Mistral beside images, and with queries that are scaled by position.

Checkpoints are read without the tensors of their images.
"""

from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mistral, mistral4, ropes
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

YARN = {  # the rotation of models whose files do not say it
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint that also takes images."""
    text, tensors = text_part(config, tensors)
    kind = text.choice("model_type", tuple(TEXT))
    return TEXT[kind](text, tensors, OTHERS)


def build_text(config: ConfigFile, tensors: Tensors, ignored: tuple[str, ...] = ()) -> Model:
    """Build the model of a Ministral 3 checkpoint, or of the text part of one, as `mistral.build` does."""
    config.only("hidden_act", "silu")
    config = config.with_defaults(rope_parameters=YARN)
    rope = config.table("rope_parameters")
    scaling = mistral4.query_scaling(rope)
    layers = llama.windowed(LayerConfig(), (config.size("sliding_window", None),))
    read = partial(ropes.read, ignored=("llama_4_scaling_beta", "max_position_embeddings"))
    options: dict[str, Any] = {"head_size": 128, "query_scaling": scaling, "rope": read, "ignored": ignored}
    return llama.decoder(config, tensors, layers, **options)


TEXT = {"mistral": mistral.build, "ministral3": build_text, "mistral4": mistral4.build_text}  # by type of the text part
