"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2, Qwen3 and Qwen3-MoE beside images.

A token of an image has three positions. The three of a token of text are equal, so its heads turn as elsewhere.
Checkpoints are read without the tensors of their images.
"""

from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import mixtures, qwen2, qwen3, qwen3_moe, ropes
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.tensors import Tensors
from specjax.types import Model

SECTIONS = "mrope_section", "mrope_interleaved"  # which of the three positions turns a number of a head


def build_second(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of the text part of Qwen2-VL or Qwen2.5-VL."""
    text, tensors = _text_part(config, tensors)
    return qwen2.build(text.with_defaults(max_window_layers=80), tensors, **_options(1e6))


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of the text part of Qwen3-VL without mixtures of experts."""
    text, tensors = _text_part(config, tensors)
    text.only("use_sliding_window", False)
    return qwen3.build(text, tensors, **_options(5e5))


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of the text part of Qwen3-VL with mixtures of experts, whose weights are renormalised."""
    text, tensors = _text_part(config, tensors)
    text.only("use_sliding_window", False)
    text.only("norm_topk_prob", True)
    names = mixtures.Names(inputs_first=_has_inputs_first(text, tensors))
    return qwen3_moe.build(text.with_defaults(norm_topk_prob=True), tensors, mixture=names, **_options(5e5))


def _text_part(config: ConfigFile, tensors: Tensors) -> tuple[ConfigFile, Tensors]:
    """Return fields and tensors of the language model; early files name its plain rotation "mrope"."""
    text, tensors = text_part(config, tensors)
    for name in ("rope_scaling", "rope_parameters"):
        table = text.fields.get(name)
        if isinstance(table, dict):
            plain = {key: "default" for key in ("type", "rope_type") if table.get(key) == "mrope"}
            text.fields[name] = table | plain
    return text, tensors


def _has_inputs_first(text: ConfigFile, tensors: Tensors) -> bool:
    """Return whether a tensor for all experts has the inputs of a matrix first, as the released files have it."""
    shape = text.size("hidden_size"), 2 * text.size("moe_intermediate_size")
    stored = [tensors.shape(name)[1:] for name in tensors.names() if name.endswith(".experts.gate_up_proj")]
    return shape in stored and shape[0] != shape[1]


def _options(theta: float) -> dict[str, Any]:
    """Return the options of `llama.decoder`, given the default base of the rotation."""
    return {"ignored": OTHERS, "rope": partial(ropes.read, theta=theta, ignored=SECTIONS)}
