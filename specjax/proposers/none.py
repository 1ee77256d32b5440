"""The proposer without drafts, with which the decoding loop decodes one token per step."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Array, Chunk, Context, Draft, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class NoDrafts:
    """A proposer that makes no drafts: K is 0."""

    num_draft_tokens = 0
    takes_pages = True

    def init(self, batch_size: int, max_length: int, pool: tuple[int, int] | None = None) -> PyTree:
        return ()

    def prefill(self, chunk: Chunk, features: Any, state: PyTree) -> PyTree:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: PyTree) -> tuple[Draft, PyTree]:
        return Draft(jnp.zeros((context.length.shape[0], 0), jnp.int32)), state

    def update(self, context: Context, verified: Verified, features: Any, state: PyTree) -> PyTree:
        return state


def none() -> NoDrafts:
    """Make no drafts: every step emits one token of the target."""
    return NoDrafts()
