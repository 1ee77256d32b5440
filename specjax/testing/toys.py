"""Targets and drafters of a few tokens, whose distributions are known exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax import keys as streams
from specjax.types import Array, Categorical, Context, Draft, Model, ModelInput, ModelOutput, PyTree, Verified


def bigram_model(logits: Array) -> Model:
    """A target whose law depends on the last token alone: row v of logits [V, V] is the law after token v."""
    return Model(params=logits, apply=_bigram_apply, init_cache=_no_cache, vocab_size=logits.shape[-1])


def _bigram_apply(params: Array, inputs: ModelInput, cache: tuple) -> tuple[ModelOutput, tuple]:
    return ModelOutput(params[inputs.tokens]), cache


def _no_cache(batch_size: int, max_length: int) -> tuple:
    return ()


def sample_draft(keys: Array, distribution: Categorical) -> tuple[Array, Categorical]:
    """The honest drafter: a token [B, 1] from each row, and the law that it came from."""
    return distributions.sample(keys, distribution), distribution


@partial(
    jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=["num_draft_tokens", "drafter", "is_ragged"]
)
@dataclass(frozen=True)
class BigramProposer:
    """Drafts from a bigram table by a drafter, `(keys [B, 1], Categorical [B, 1, V]) -> (tokens, Categorical)`.

    A drafter that claims None makes deterministic drafts. Ragged rows have as many drafts as their length says, modulo.
    """

    logits: Array  # [V, V]
    num_draft_tokens: int
    drafter: Callable[[Array, Categorical], tuple[Array, Categorical | None]] = sample_draft
    is_ragged: bool = False

    def init(self, batch_size: int, max_length: int) -> PyTree:
        return ()

    def prefill(self, context: Context, features: Any, state: PyTree) -> PyTree:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: PyTree) -> tuple[Draft, PyTree]:
        token = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        drawn = []
        for i in range(self.num_draft_tokens):
            noise = streams.stream(keys[:, :1], streams.DRAFT, i)
            drawn.append(self.drafter(noise, Categorical(self.logits[token])))
            token = drawn[-1][0]
        tokens = jnp.concatenate([tokens for tokens, _ in drawn], axis=1)
        num_tokens = context.length % (self.num_draft_tokens + 1) if self.is_ragged else None
        if drawn[0][1] is None:
            return Draft(tokens, None, num_tokens), state
        logits = jnp.concatenate([reported.logits for _, reported in drawn], axis=1)
        return Draft(tokens, Categorical(logits), num_tokens), state

    def update(self, context: Context, verified: Verified, features: Any, state: PyTree) -> PyTree:
        return state


def first_token(keys: Array, distribution: Categorical) -> tuple[Array, None]:
    """A deterministic drafter."""
    return jnp.zeros(keys.shape, jnp.int32), None
