"""Qwen3.5 and later releases of its types: Qwen3-Next with other projections, with or without mixtures of experts.

Checkpoints that also take images are read without the tensors of their images.
"""

from specjax.models.config_file import ConfigFile
from specjax.models.families import qwen3_next
from specjax.models.families.text_part import text_part
from specjax.models.layer import GatedMLP
from specjax.models.tensors import Tensors
from specjax.types import Model

VISION = "model.visual.*"  # names of tensors that only images pass through


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen3.5 checkpoint without mixtures of experts."""
    config, tensors = text_part(config, tensors)
    return qwen3_next.decoder(config, tensors, qwen3_next.layers(config, GatedMLP()), (qwen3_next.MTP_LAYERS, VISION))


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Qwen3.5 checkpoint with mixtures of experts."""
    config, tensors = text_part(config, tensors)
    each = qwen3_next.layers(config, qwen3_next.mixture(config))
    return qwen3_next.decoder(config, tensors, each, (qwen3_next.MTP_LAYERS, VISION))
