"""The built-in models.

They need the package safetensors (extra `models`), which is imported when a function is first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from specjax.validation.extras import needs

if TYPE_CHECKING:
    from specjax.models.cache_dtype import with_cache_dtype
    from specjax.models.checkpoint import load
    from specjax.models.directory import Checkpoint
    from specjax.models.network import with_feature_layers
    from specjax.models.own_attention import cached_attention
    from specjax.models.sharding import tensor_parallel
    from specjax.parallel import data_parallel

__all__ = [
    "EMBEDDED",
    "Checkpoint",
    "cached_attention",
    "data_parallel",
    "load",
    "tensor_parallel",
    "with_cache_dtype",
    "with_feature_layers",
]

EMBEDDED = Path(__file__).parent / "embedded"  # holds tokenizer.json, the checkpoints target/ and draft/, heads
_MODULES = {  # where each name is
    "Checkpoint": "specjax.models.directory",
    "cached_attention": "specjax.models.own_attention",
    "data_parallel": "specjax.parallel",
    "load": "specjax.models.checkpoint",
    "tensor_parallel": "specjax.models.sharding",
    "with_cache_dtype": "specjax.models.cache_dtype",
    "with_feature_layers": "specjax.models.network",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("models"):
        return getattr(import_module(_MODULES[name]), name)
