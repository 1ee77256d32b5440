"""The form in which the decoding loop calls proposers: with a `Memory`, whether they know of it or not."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from specjax.types import Array, Chunk, Context, Draft, Memory, ModelInput, Proposer, PyTree, Verified


class InMemory:
    """The base of proposers whose state is a `Memory`."""

    takes_pages = True

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        raise NotImplementedError

    def init(self, batch_size: int, max_length: int) -> Memory:
        """Return the state of a batch whose caches are dense."""
        return self.init_memory(batch_size, batch_size, max_length)


@partial(jax.tree_util.register_dataclass, data_fields=["proposer"], meta_fields=[])
@dataclass(frozen=True)
class DenseProposer(InMemory):
    """A proposer whose own state has leaves [B, ...] alone, with that state in the rows of a `Memory`."""

    proposer: Any
    takes_pages = False

    @property
    def num_draft_tokens(self) -> int:
        return self.proposer.num_draft_tokens

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory(rows=self.proposer.init(batch_size, page_size))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        chunk = Chunk(inputs.tokens, following, inputs.positions, inputs.counts, previous=previous)
        rows = self.proposer.prefill(chunk, features, state.take(inputs.rows).rows)
        return state.put(inputs.rows, Memory(rows=rows))

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        draft, rows = self.proposer.propose(keys, context._replace(pages=None), sampling, state.rows)
        return draft, Memory(rows=rows)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return Memory(rows=self.proposer.update(context._replace(pages=None), verified, features, state.rows))

    def commit(self, state: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
        own = getattr(self.proposer, "commit", None)
        return state if own is None else own(state, inputs, path, count)


def in_memory(proposer: Any) -> Proposer:
    """Return a proposer whose state is a `Memory`: the same one, or one that keeps its state in the rows."""
    return proposer if hasattr(proposer, "init_memory") else DenseProposer(proposer)
