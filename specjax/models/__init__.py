"""The built-in models.

They need the packages flax and safetensors (extra `models`), which are imported when a function is first used.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.models.checkpoint import load
    from specjax.models.network import with_feature_layers
    from specjax.models.sharding import tensor_parallel
    from specjax.parallel import data_parallel

__all__ = ["EMBEDDED", "data_parallel", "load", "tensor_parallel", "with_feature_layers"]

EMBEDDED = Path(__file__).parent / "embedded"  # holds tokenizer.json, the checkpoints target/ and draft/, heads


def __getattr__(name: str):
    if name == "load":
        from specjax.models.checkpoint import load

        return load
    if name == "with_feature_layers":
        from specjax.models.network import with_feature_layers

        return with_feature_layers
    if name == "tensor_parallel":
        from specjax.models.sharding import tensor_parallel

        return tensor_parallel
    if name == "data_parallel":
        from specjax.parallel import data_parallel

        return data_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
