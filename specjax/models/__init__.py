"""The built-in models.

`load` needs the packages flax and safetensors (extra `models`), which are imported when `load` is first used.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.models.checkpoint import load

__all__ = ["EMBEDDED", "load"]

EMBEDDED = Path(__file__).parent / "embedded"  # holds tokenizer.json and the checkpoints target/ and draft/


def __getattr__(name: str):
    if name == "load":
        from specjax.models.checkpoint import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
