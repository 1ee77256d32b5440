"""The families of checkpoints, one file each: a function from config.json and the tensors to a `Model`.

A new one is a file with `build`, an import and an entry here, and a config in tests/families.py. Between the fields and
the tensors `build` calls `config.check_computation()`, which refuses fields that the family should have read.
"""

from collections.abc import Callable

from specjax.models.config_file import ConfigFile
from specjax.models.families import gemma, gemma2, llama, mistral, opt, qwen2, qwen3
from specjax.models.tensors import Tensors
from specjax.types import Model

BUILD: dict[str, Callable[[ConfigFile, Tensors], Model]] = {  # by model_type in config.json
    "gemma": gemma.build,
    "gemma2": gemma2.build,
    "llama": llama.build,
    "mistral": mistral.build,
    "opt": opt.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}
