"""Targets and drafters with a few tokens, whose distributions are known exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.keys import DRAFT, stream
from specjax.types import (
    Array,
    Categorical,
    Context,
    Draft,
    Features,
    Memory,
    Model,
    ModelInput,
    ModelOutput,
    PyTree,
    Verified,
)


def bigram_model(logits: Array) -> Model:
    """Return a target in which only the last token decides the next: row v of logits [V, V] follows token v.

    For drafters that read features, its hidden states of size V are these rows, and so is its one tap.
    """
    return Model(logits, _bigram_apply, _no_cache, vocab_size=logits.shape[-1], takes_pages=True, feature_layers=(0,))


def _bigram_apply(params: Array, inputs: ModelInput, cache: tuple) -> tuple[ModelOutput, tuple]:
    logits = params[inputs.tokens]
    return ModelOutput(logits, Features(logits, logits)), cache


def _no_cache(batch_size: int, max_length: int) -> tuple:
    return ()


def sample_draft(keys: Array, distribution: Categorical) -> tuple[Array, Categorical]:
    """Draw a token [B, 1] from each row, and report the distribution that it was drawn from."""
    return distributions.sample(keys, distribution), distribution


@partial(
    jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=["num_draft_tokens", "drafter", "is_ragged"]
)
@dataclass(frozen=True)
class BigramProposer:
    """A proposer that drafts from a bigram table.

    The drafter `(keys [B, 1], Categorical [B, 1, V]) -> (tokens [B, 1], Categorical)` draws one token per row and
    reports its distribution, which is None for deterministic drafts.
    """

    logits: Array  # [V, V]
    num_draft_tokens: int
    drafter: Callable[[Array, Categorical], tuple[Array, Categorical | None]] = sample_draft
    is_ragged: bool = False  # whether a row of length n has n modulo (K+1) drafts, in place of K
    takes_pages = True

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory()

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        token = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        drawn = []
        for i in range(self.num_draft_tokens):
            drawn.append(self.drafter(stream(keys[:, :1], DRAFT, i), Categorical(self.logits[token])))
            token = drawn[-1][0]
        tokens = jnp.concatenate([tokens for tokens, _ in drawn], axis=1)
        num_tokens = context.length % (self.num_draft_tokens + 1) if self.is_ragged else None
        if drawn[0][1] is None:
            return Draft(tokens, None, num_tokens), state
        logits = jnp.concatenate([reported.logits for _, reported in drawn], axis=1)
        return Draft(tokens, Categorical(logits), num_tokens), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return state


def first_token(keys: Array, distribution: Categorical) -> tuple[Array, None]:
    """Draft token 0 in every row, deterministically."""
    # Behind the barrier XLA does not fold the cumulative product of a constant of many rows, which takes seconds.
    return jax.lax.optimization_barrier(jnp.zeros(keys.shape, jnp.int32)), None
