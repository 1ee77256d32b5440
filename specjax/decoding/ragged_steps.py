"""Steps whose rows have other numbers of drafts: the target computes the drafts that there are, and no padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specjax.decoding import tree_steps
from specjax.operations.groups import join, split
from specjax.operations.pieces import in_tiles
from specjax.types import Array, Draft, DraftTree, Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class _Within:
    """`Model.apply` whose parameters include the number of tokens of each row, which are `size` together at most."""

    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]
    width: int  # K + 1, the most tokens of a row
    size: int

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        own, num_tokens = params
        if inputs.tokens.shape != (num_tokens.shape[0], self.width):  # a call of another scorer
            return self.apply(own, inputs, cache)
        call = join([inputs._replace(num_tokens=num_tokens)], self.size)
        output, cache = self.apply(own, call, cache)
        (logits,), (features,) = split(call, output.logits), split(call, output.features)
        return ModelOutput(in_tiles(inputs, logits), in_tiles(inputs, features)), cache


def within(model: Model, proposer: Any, draft: Draft | DraftTree) -> Model:
    """Return a model that computes the drafts of the rows alone, where a proposer says how many these are at most.

    It is the model itself where rows have all their drafts, or where the model takes no ragged calls.

    Args:
        model: the target.
        proposer: the proposer, whose `drafts_per_row`, if it has it, says how many drafts the rows have on average at
            most.
        draft: its draft.
    """
    most: int | None = getattr(proposer, "drafts_per_row", None)
    takes_ragged = model.takes_groups and model.takes_ragged
    if most is None or not takes_ragged or isinstance(draft, DraftTree) or most >= draft.tokens.shape[1]:
        return model
    num_rows, width = draft.tokens.shape[0], draft.tokens.shape[1] + 1
    num_tokens: Array = tree_steps.num_drafts(draft) + 1
    params: Any = model.params, num_tokens
    return replace(model, params=params, apply=_Within(model.apply, width, num_rows * (most + 1)))
