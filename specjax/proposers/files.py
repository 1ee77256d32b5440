"""The directory of a drafter, and what a drafter shares with its target."""

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specjax.types import Array, Model

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors


@dataclass(frozen=True)
class TargetWeights:
    """The tables of a target that drafters share."""

    embedding: Array  # [V, H]
    head: Array  # [V, H]


def target_weights(target: Model) -> TargetWeights:
    """Return the embedding and the head of a built-in model.

    Raises:
        ValueError: the parameters of the target are not those of a built-in model.
    """
    params = target.params
    if not isinstance(params, dict) or getattr(params.get("embedding"), "ndim", None) != 2:
        raise ValueError(f"target must be a built-in model, whose params have `embedding`, got {type(params).__name__}")
    return TargetWeights(params["embedding"], params.get("head", params["embedding"]))


def open_directory(directory: str | Path, target: Model) -> tuple["ConfigFile", "Tensors"]:
    """Return the config.json of a drafter and its tensors, which are read in the dtype of the target.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or the target is not a built-in model.
    """
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors, drafter_files

    directory = Path(directory)
    config = ConfigFile(directory / "config.json")
    dtype = np.dtype(target_weights(target).embedding.dtype)
    return config, Tensors(directory, dtype, files=drafter_files(directory))


def expect(name: str, value: object, expected: object, what: str) -> None:
    """Raise ValueError unless a number that a drafter has is that of its target; `what` says which that is."""
    if value != expected:
        raise ValueError(f"{name} must be {expected}, {what}, got {value}")


def refuse_unread(config: "ConfigFile", *patterns: str) -> None:
    """Raise ValueError for an unread field that matches a pattern and is neither null nor False."""
    for name in config.unread():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise config.refused(name)
