"""Plain steps of a target whose drafter waits: the features that the drafter reads are held, and fed to it later.

While drafts do not pay, a step without them should cost no more than a step of an engine without a drafter. So the
target's features of up to `HELD` tokens of each row lie in an array, and one call gives them to the drafter's `update`,
before drafts are made again or when there is no more room.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.decoding import state_rows
from specjax.decoding.drafters import InMemory, commit_of, in_memory
from specjax.engine.draft_length import HELD
from specjax.engine.slot_calls import Output, step
from specjax.parallel import OnMesh
from specjax.proposers.fallback import Fallback
from specjax.proposers.none import NoDrafts, Paused
from specjax.types import NO_PAGE, Array, Context, Draft, Memory, Model, ModelInput, Proposer, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class Holding(InMemory):
    """A proposer without drafts that holds the target's features of the tokens that its steps feed.

    The rows of its memory are the features [B, HELD, ...], and how many tokens [B] int32 of each row they are of.
    """

    num_draft_tokens = 0

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft, Memory]:
        return NoDrafts().propose(keys, context, sampling, state)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        held, counts = state.rows
        place = jnp.where(context.active, counts, HELD)  # out of range, which is not written
        rows = jnp.arange(counts.shape[0])
        held = jax.tree.map(lambda all_rows, new: all_rows.at[rows, place].set(new[:, 0], mode="drop"), held, features)
        return Memory(rows=(held, counts))


def may_hold(model: Model, paused: Proposer) -> bool:
    """Return whether the features for a drafter can wait.

    Args:
        model: the target.
        paused: the drafter with K = 0. A draft model needs no features: it reads the tokens themselves.
    """
    is_own = isinstance(paused, Paused) and not isinstance(paused.proposer, Fallback) and commit_of(paused) is None
    return is_own and not isinstance(model.apply, OnMesh)


class Held:
    """The features that wait, and the host's count of them.

    Args:
        features: features of one token [1, ...].
        num_slots: B.
        sharding: of the arrays on the device.

    Attributes:
        features: [B, HELD, ...]. The next step that holds reuses the arrays.
        counts: [B] int32, how many tokens of each slot they are of.
    """

    def __init__(self, features: PyTree, num_slots: int, sharding: jax.sharding.Sharding):
        empty = jax.tree.map(lambda x: jnp.zeros((num_slots, HELD, *x.shape[1:]), x.dtype), features)
        self.features = jax.device_put(empty, sharding)
        self.counts = np.zeros(num_slots, np.int32)

    def must_be_fed(self, rows: np.ndarray | None, holds: bool) -> bool:
        """Return whether the drafter must be fed before a step in `rows`, which holds or makes drafts."""
        most = self.counts[self._slots(rows)].max(initial=0)
        return bool(most == HELD if holds else most > 0)

    def add(self, rows: np.ndarray | None) -> None:
        """Count a step that holds."""
        self.counts = self.counts.copy()  # the device may still read the other
        self.counts[self._slots(rows)] += 1

    def clear(self, slots: Any = slice(None)) -> None:
        """Count nothing in some slots."""
        self.counts = self.counts.copy()
        self.counts[slots] = 0

    def _slots(self, rows: np.ndarray | None) -> Any:
        return slice(None) if rows is None else rows[rows < len(self.counts)]


def hold_step(
    model: Model,
    state: decode.State,
    held: PyTree,
    counts: Array,
    rows: Array | None = None,
    **options: Any,
) -> tuple[decode.State, PyTree, Output]:
    """Take a step of `slot_calls.step` without drafts, which leaves the drafter's state alone.

    Args:
        model: the target.
        state: the state.
        held: the features [B, HELD, ...] that wait.
        counts: [B] int32 below HELD, how many tokens of each row they are of.
        rows: as `step` takes it.
        options: the other options of `step`.

    Returns:
        The state, the features that wait, and the output.
    """
    drafter = state.proposer
    waiting = state._replace(proposer=Memory(rows=(held, counts)))
    state, output = step(model, Holding(), waiting, rows, **options)
    return state._replace(proposer=drafter), state.proposer.rows[0], output


def feed_held(
    proposer: Proposer, state: decode.State, held: PyTree, counts: Array, rows: Array | None = None
) -> decode.State:
    """Give a drafter the features that wait.

    Args:
        proposer: the drafter.
        state: the state.
        held: the features [B, HELD, ...] of the last tokens that the target was fed.
        counts: [B] int32 up to HELD, how many tokens of each row they are of.
        rows: as `step` takes it. The others are left out.
    """
    context, memory = state.context, state.proposer
    if rows is not None:
        part = state_rows.take(state, rows)
        context, memory = part.context, part.proposer
        held, counts = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), (held, counts))
    elif context.pages is not None:
        context = context._replace(pages=jnp.where(context.active[:, None], context.pages, NO_PAGE))
    counts = jnp.where(context.active, counts, 0)
    buffer_size = context.tokens.shape[1]
    # Rows of which nothing waits stand past the end, where nothing is written.
    start = jnp.where(counts > 0, context.length - counts, buffer_size)
    index = jnp.arange(HELD, dtype=jnp.int32)[None]
    is_held = index < counts[:, None]
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(start[:, None] + index, buffer_size - 1), axis=1)
    verified = Verified(jnp.where(is_held, tokens, -1), jnp.zeros_like(counts))
    features = jax.tree.map(lambda x: jnp.where(is_held.reshape(*is_held.shape, *[1] * (x.ndim - 2)), x, 0), held)
    before = context._replace(length=start, active=counts > 0)
    memory = in_memory(proposer).update(before, verified, features, memory)
    return state._replace(proposer=memory if rows is None else state.proposer.put(rows, memory))
