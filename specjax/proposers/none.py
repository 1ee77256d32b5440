"""Proposers without drafts, with which the decoding loop decodes one token per step."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.drafters import Commit, InMemory, check_draft_length, commit_of
from specjax.types import Array, Context, Draft, Memory, ModelInput, Proposer, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class NoDrafts(InMemory):
    """A proposer that makes no drafts: K is 0."""

    num_draft_tokens = 0
    takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "NoDrafts":
        check_draft_length(num_draft_tokens, 0)
        return self

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory()

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        return _no_drafts(context), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return state


@partial(jax.tree_util.register_dataclass, data_fields=["proposer"], meta_fields=[])
@dataclass(frozen=True)
class Paused(InMemory):
    """A proposer that makes no drafts, and keeps the state of another proposer up to date."""

    proposer: Any
    num_draft_tokens = 0

    @property
    def takes_pages(self) -> bool:
        return self.proposer.takes_pages

    @property
    def takes_groups(self) -> bool:
        return getattr(self.proposer, "takes_groups", False)

    @property
    def commit(self) -> Commit | None:
        return commit_of(self.proposer)

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> Proposer:
        return self.proposer.with_num_draft_tokens(num_draft_tokens, may_pause=may_pause)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return self.proposer.init_memory(batch_size, num_pages, page_size)

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return self.proposer.prefill(inputs, following, previous, features, state)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        return _no_drafts(context), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return self.proposer.update(context, verified, features, state)


def _no_drafts(context: Context) -> Draft:
    return Draft(jnp.zeros((context.length.shape[0], 0), jnp.int32))


def none() -> NoDrafts:
    """Make no drafts: every step emits one token of the target."""
    return NoDrafts()
