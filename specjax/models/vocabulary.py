"""Whether target and draft have one vocabulary, and models whose logits have its size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.types import Model, ModelInput, ModelOutput, PyTree

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_same_vocabulary(target: "Tokenizer", draft: "Tokenizer") -> None:
    """Raise ValueError where two tokenizers do not give every id the same token."""
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if target_ids == draft_ids:
        return
    token, _ = min(target_ids.items() ^ draft_ids.items(), key=lambda item: item[1])
    raise ValueError(
        f"draft must have the vocabulary of the target, in which the token {token!r} has the id "
        f"{target_ids.get(token)}, got {draft_ids.get(token)}"
    )


@dataclass(frozen=True)
class ResizedApply:
    """`Model.apply` with the logits cut, or filled up with -inf, to a number of tokens."""

    apply: Callable
    vocab_size: int

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        output, cache = self.apply(params, inputs, cache)
        logits = output.logits[..., : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return output._replace(logits=logits), cache


def resize_vocabulary(model: Model, vocab_size: int) -> Model:
    """The model with logits of so many tokens: for a pair whose embeddings are padded to different sizes."""
    return replace(model, apply=ResizedApply(model.apply, vocab_size), vocab_size=vocab_size)
