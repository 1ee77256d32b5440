"""Check that target and draft share a vocabulary, and resize the logits of a model to a vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.types import Model, ModelInput, ModelOutput, PyTree

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_same_vocabulary(target: "Tokenizer", draft: "Tokenizer") -> None:
    """Raise ValueError unless two tokenizers give every token the same id."""
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
    """`Model.apply` whose logits are cut, or padded with -inf, to `vocab_size` tokens."""

    apply: Callable
    vocab_size: int

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        output, cache = self.apply(params, inputs, cache)
        logits = output.logits[..., : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return output._replace(logits=logits), cache


def resize_vocabulary(model: Model, vocab_size: int) -> Model:
    """Return the model with logits for `vocab_size` tokens, for a pair whose embeddings are padded differently.

    Args:
        model: model with any vocabulary size.
        vocab_size: the new size; logits beyond it are dropped, and missing logits are -inf.
    """
    return replace(model, apply=ResizedApply(model.apply, vocab_size), vocab_size=vocab_size)
