"""The families of checkpoints, one file each, with a function `build(config, tensors)` that returns a `Model`.

A new family is a file with `build`, an import and an entry here, and a config in tests/families.py. After reading the
fields and before reading the tensors, `build` calls `config.check_computation()`, which refuses fields of config.json
that change the computation and that the family has not read. Errors are ValueErrors that name the field or tensor.
"""

from collections.abc import Callable

from specjax.models.config_file import ConfigFile
from specjax.models.families import (
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mimo,
    mistral,
    mistral3,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from specjax.models.tensors import Tensors
from specjax.types import Model

BUILD: dict[str, Callable[[ConfigFile, Tensors], Model]] = {  # build functions by model_type
    "deepseek_v3": deepseek_v3.build,
    "gemma": gemma.build,
    "gemma2": gemma2.build,
    "gemma3": gemma3.build,
    "gemma3_text": gemma3.build,
    "gemma4": gemma4.build,
    "gemma4_text": gemma4.build,
    "gemma4_unified": gemma4.build,
    "gemma4_unified_text": gemma4.build,
    "glm4_moe": glm4_moe.build,
    "glm4_moe_lite": deepseek_v3.build_lite,
    "gpt_oss": gpt_oss.build,
    "granite": granite.build,
    "granitemoehybrid": granite.build_hybrid,
    "llama": llama.build,
    "mimo": mimo.build,
    "ministral3": mistral3.build_text,
    "mistral": mistral.build,
    "mistral3": mistral3.build,
    "mixtral": mixtral.build,
    "nemotron_h": nemotron_h.build,
    "olmo2": olmo2.build,
    "olmo3": olmo3.build,
    "opt": opt.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3_5": qwen3_5.build,
    "qwen3_5_moe": qwen3_5.build_moe,
    "qwen3_5_moe_text": qwen3_5.build_moe,
    "qwen3_5_text": qwen3_5.build,
    "qwen3_moe": qwen3_moe.build,
    "qwen3_next": qwen3_next.build,
    "smollm3": smollm3.build,
}
