"""A step beside a packed call with prompts: the target runs both as groups of one call, and reads its weights once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specjax.operations.groups import check_groups, join, split
from specjax.operations.pieces import in_tiles
from specjax.types import Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class _Beside:
    """`Model.apply` whose parameters include a packed call, which runs beside each call."""

    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        own, prompts = params
        call = join([inputs, prompts])
        output, cache = self.apply(own, call, cache)
        logits, _ = split(call, output.logits)
        features, of_prompts = split(call, output.features)
        return ModelOutput(in_tiles(inputs, logits), (in_tiles(inputs, features), of_prompts)), cache


def beside(model: Model, prompts: ModelInput) -> Model:
    """Return a model that runs a packed call beside each call.

    Its features are a pair: the features of the call [R, T, ...], and of the packed call [1, C, ...].

    Raises:
        ValueError: the model takes no groups.
    """
    check_groups(join([prompts]), model.takes_groups)
    params: Any = model.params, prompts
    return replace(model, params=params, apply=_Beside(model.apply))
