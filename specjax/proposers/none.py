"""The proposer without drafts, with which the decoding loop decodes one token per step."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.drafters import InMemory
from specjax.types import Array, Context, Draft, Memory, ModelInput, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class NoDrafts(InMemory):
    """A proposer that makes no drafts: K is 0."""

    num_draft_tokens = 0

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory()

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        return Draft(jnp.zeros((context.length.shape[0], 0), jnp.int32)), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return state


def none() -> NoDrafts:
    """Make no drafts: every step emits one token of the target."""
    return NoDrafts()
