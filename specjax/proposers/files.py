"""The directory of a drafter, and the arrays that a drafter shares with its target."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.models.directory import Checkpoint
from specjax.models.quantized import Quantized, dequantize
from specjax.parallel import OnMesh, of_one_device
from specjax.proposers.drawing import Reduced, reduced_vocabulary
from specjax.types import Array, Model
from specjax.validation import is_integer

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors

ANY_DEPTH = 8  # drafts of a head that can make any number, where no number is given


@dataclass(frozen=True)
class TargetWeights:
    """The tables of a target that drafters share, whole on each device where devices share the target."""

    target: Model

    @property
    def embedding(self) -> Array:  # [V, H]
        return as_floats(self._whole("embedding"))

    @property
    def head(self) -> Any:  # [V, H], which may be `Quantized`
        return self._whole("head" if "head" in self.target.params else "embedding")

    @property
    def hidden_size(self) -> int:
        return self.target.params["embedding"].shape[1]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.target.params["embedding"].dtype)

    def _whole(self, name: str) -> Any:
        table, apply = self.target.params[name], self.target.apply
        if not isinstance(apply, OnMesh):
            return table
        return jax.jit(lambda table: table[: self.target.vocab_size], out_shardings=apply.whole)(table)


def as_floats(matrix: Any) -> Array:
    """Return a matrix as floats, for which its codes stand if it is `Quantized`."""
    return dequantize(matrix, matrix.dtype) if isinstance(matrix, Quantized) else matrix


def target_weights(target: Model) -> TargetWeights:
    """Return the embedding and the head of a built-in model.

    Raises:
        ValueError: the parameters of the target do not come from a built-in model.
    """
    params = target.params
    if not isinstance(params, dict) or getattr(params.get("embedding"), "ndim", None) != 2:
        raise ValueError(f"target must be a built-in model, whose params have `embedding`, got {type(params).__name__}")
    return TargetWeights(target)


def num_layers(target: Model) -> int:
    """Return the number of layers of a built-in model.

    Raises:
        ValueError: the target is not a built-in model.
    """
    config = getattr(of_one_device(target), "config", None)
    if config is None:
        raise ValueError(f"target must be a built-in model, whose layers are counted, got {target.apply!r}")
    return config.num_layers


def open_directory(
    directory: str | Path | Checkpoint, target: Model, fields: Mapping[str, Any] | None = None
) -> tuple["ConfigFile", "Tensors"]:
    """Return the config.json of a drafter and its tensors, which are read in the dtype of the target.

    `fields` take the place of fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or the target is not a built-in model.
    """
    checkpoint = Checkpoint.of(directory)
    config = checkpoint.config
    config.fields |= fields or {}
    config.ignore("quantization_config")  # `Checkpoint.scheme` has read it
    return config, checkpoint.drafter_tensors(target_weights(target).dtype)


def expect(name: str, value: object, expected: object, what: str) -> None:
    """Raise ValueError unless a number of a drafter equals its target's; `what` names the target's number."""
    if value != expected:
        raise other_target(f"{name} must be {expected}, {what}, got {value}")


def other_target(reason: str) -> ValueError:
    """Return the error for a drafter that does not fit its target, for a `reason`."""
    return ValueError(f"the drafter is made for another target: {reason}; give the model that it was trained for")


def refuse_unread(config: "ConfigFile", *patterns: str) -> None:
    """Raise ValueError for an unread field that matches a pattern and is neither null nor False."""
    for name in config.unread():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise config.refused(name)


def num_drafts(num_draft_tokens: int | None) -> int:
    """Return K of a head that can make any number of drafts; `ANY_DEPTH` where no number is given."""
    return ANY_DEPTH if num_draft_tokens is None else num_draft_tokens


def check_depth(num_draft_tokens: int | None, depth: int, what: str) -> int:
    """Return K, by default the trained depth of a drafter; `what` names the depth.

    Raises:
        ValueError: K is not an integer in [1, depth].
    """
    if num_draft_tokens is None:
        return depth
    if not (is_integer(num_draft_tokens) and 1 <= num_draft_tokens <= depth):
        raise ValueError(f"num_draft_tokens must be in [1, {depth}], {what}, got {num_draft_tokens!r}")
    return int(num_draft_tokens)


def draft_vocabulary(name: str, token_ids: np.ndarray | None, size: int, vocab_size: int) -> Reduced | None:
    """Return the vocabulary of a drafter with `size` logits, None if it is the target's.

    Args:
        name: of the ids, for messages.
        token_ids: [D] integers, the target's id of each token of the drafter; None if they are the same.
        size: D.
        vocab_size: V.

    Raises:
        ValueError: the ids are not D different ones in [0, V), or there are none and D is not V.
    """
    if token_ids is None:
        if size != vocab_size:
            raise ValueError(f"{name} must say which tokens of V = {vocab_size} the {size} logits are for, got none")
        return None
    ids = np.asarray(token_ids)
    if ids.shape != (size,) or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{name} must be integers of shape [D] = ({size},) in [0, V = {vocab_size}), got {ids.dtype} {ids.shape} "
            f"from {ids.min()} to {ids.max()}"
        )
    repeated = size - len(np.unique(ids))
    if repeated:
        raise ValueError(f"{name} must have each id once, got {repeated} of {size} again")
    return reduced_vocabulary(ids, vocab_size)
