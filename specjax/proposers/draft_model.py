"""Drafts from a small model, which runs K times in each step."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import tree_steps
from specjax.decoding.calls import run
from specjax.decoding.drafters import check_draft_length
from specjax.keys import DRAFT, stream
from specjax.parallel.loops import as_carry
from specjax.prompts import without_pending
from specjax.proposers.drawing import Drawer, draft_options, draft_sampling, only_in
from specjax.proposers.none import NoDrafts, none
from specjax.proposers.split import rows_to_draft, run_where
from specjax.proposers.tree_drawing import InTrees, in_tree, only_root, tree_drawer_of
from specjax.sampling import Sampling
from specjax.types import (
    Array,
    Context,
    Draft,
    DraftTree,
    Memory,
    Model,
    ModelInput,
    ModelOutput,
    PyTree,
    Verified,
)
from specjax.validation import as_python, is_integer

CATCH_UP = 16  # tokens in each call that feeds tokens committed while the draft model did not run


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "temperature"],
    meta_fields=["num_draft_tokens", "max_length", "is_greedy", "speculate_below", "may_pause", "tree", "coupled"],
)
@dataclass(frozen=True)
class DraftModel(InTrees):
    """A proposer that draws K tokens from a draft model, by the sampling parameters of each request.

    The rows of its memory are a pair: the rows of the draft model's memory, and [B] int32, the number of committed
    tokens, from the first on, that the draft model has been fed.
    """

    model: Model
    num_draft_tokens: int
    max_length: int | None
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    speculate_below: int | None = None
    may_pause: bool = False  # rows may skip steps; the tokens they missed are fed when drafting resumes
    tree: int | None = None  # N, the number of nodes; None makes a chain
    coupled: bool = False

    @property
    def takes_pages(self) -> bool:
        return self.model.takes_pages

    @property
    def takes_groups(self) -> bool:
        return self.model.takes_groups

    @property
    def is_recurrent(self) -> bool:
        """Whether the draft model keeps a state that must take each token once."""
        return self.model.commit is not None

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "DraftModel | NoDrafts":
        check_draft_length(num_draft_tokens)
        if num_draft_tokens == 0:
            return none()
        return replace(self, num_draft_tokens=num_draft_tokens, may_pause=self.may_pause or may_pause)

    def with_tree(self, tree: int | None, *, coupled: bool) -> "DraftModel":
        if self.is_recurrent:
            raise ValueError("tree must be None for a draft model with a recurrent state, which keeps one path alone")
        return super().with_tree(tree, coupled=coupled)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        if self.max_length is not None:
            page_size = min(page_size, self.max_length)  # no row has slots past the limit
        memory = self.model.init_memory(batch_size, num_pages, page_size)
        return _joined(memory, jnp.zeros(batch_size, jnp.int32))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        memory, length = _parts(state)
        inputs = without_pending(inputs, following) if self.is_recurrent else inputs
        memory = self._run(inputs, memory)[1]
        held, counts, starts = Memory(rows=length), inputs.counts, inputs.starts
        # A recurrent model is fed nothing of a prompt of one token, and forgets the sequence that had the row before.
        is_own = (counts > 0) | (starts == 0)
        own = jnp.where(is_own, starts + counts, held.take(inputs.sequences).rows)
        return _joined(memory, held.put(inputs.sequences, Memory(rows=own)).rows)

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory
    ) -> tuple[Draft | DraftTree, Memory]:
        num_drafts = self.num_draft_tokens
        num_slots = num_drafts if self.tree is None else self.tree - 1
        speculates, may_skip = rows_to_draft(context, num_slots, self.max_length, self.speculate_below)
        if self.may_pause:
            state = self._catch_up(context, speculates, state)
        if self.tree is not None:
            given = keys, context, sampling, state
            tree, state = run_where(speculates, self._grow, *given) if may_skip else self._grow(*given)
            return only_root(speculates, tree), state
        draft_keys = stream(keys[:, :1], DRAFT, jnp.arange(num_drafts, dtype=jnp.int32)[None])
        sampling = draft_sampling(sampling, self.temperature, self.is_greedy)
        operands = draft_keys, context, sampling, state
        draft_tokens = partial(self._draft_from_state, speculates) if self.is_recurrent else self._draft
        if may_skip:
            draft, state = run_where(speculates, draft_tokens, *operands)
        else:
            draft, state = draft_tokens(*operands)
        return only_in(speculates, draft), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        if self.is_recurrent:
            return state  # it has been fed committed tokens alone
        if self.tree is not None:
            return state  # the nodes of a tree are not in the slots of a chain
        memory, fed = _parts(state)
        kept = jnp.minimum(verified.num_accepted, self.num_draft_tokens - 1)  # the last draft has not been fed
        return _joined(memory, jnp.where(fed == context.length, context.length + kept, fed))

    def _catch_up(self, context: Context, speculates: Array, state: Memory) -> Memory:
        """Feed the tokens that were committed while a row did not speculate, once it speculates again."""

        # the tokens that the next call of `propose` feeds
        num_left = self.num_draft_tokens + 1 if self.is_recurrent or self.tree is not None else 2

        def is_behind(state: Memory) -> Array:
            return jnp.any(speculates & (_parts(state)[1] < context.length - num_left))

        def feed(state: Memory) -> Memory:
            memory, fed = _parts(state)
            inputs = _committed(context, fed, CATCH_UP)
            if self.is_recurrent:
                counts = jnp.where(speculates, jnp.clip(context.length - num_left - fed, 0, CATCH_UP), 0)
                return _joined(self._run(inputs._replace(num_tokens=counts), memory)[1], fed + counts)
            return _joined(self._run(inputs, memory)[1], jnp.minimum(fed + CATCH_UP, context.length))

        return jax.lax.while_loop(is_behind, feed, as_carry(feed, state, context.length))

    def _run(self, inputs: ModelInput, memory: Memory) -> tuple[ModelOutput, Memory]:
        """Call the draft model. It has no pages past its limit: no row reads there, so none writes."""
        leaves = jax.tree.leaves(memory.pools)
        if inputs.pages is not None and self.max_length is not None and leaves:
            num_pages = -(-self.max_length // leaves[0].shape[1])
            inputs = inputs._replace(pages=inputs.pages[:, :num_pages])
        return run(self.model, inputs, memory)

    def _draft(self, keys: Array, context: Context, sampling: Sampling, state: Memory) -> tuple[Draft, Memory]:
        """Draw K tokens for every row, and return the draft and the new state.

        The first call feeds the last two committed tokens, the others feed one draft each. Two tokens are needed
        because the last draft is not fed: if it is accepted, the cache lacks it and the token that follows.
        """
        memory, fed = _parts(state)
        start = jnp.maximum(context.length - 2, 0)
        output, memory = self._run(_committed(context, start, 2), memory)
        last = (context.length - 1 - start)[:, None, None]  # a context of one token has its only token first
        logits = jnp.take_along_axis(output.logits, last, axis=1)

        def advance(token: Array, index: Array, memory: Memory) -> tuple[Array, Memory]:
            inputs = ModelInput(token, context.length[:, None] + index - 1, pages=context.pages)
            output, memory = self._run(inputs, memory)
            return output.logits, memory

        draft, memory = Drawer(keys, context, sampling, self.is_greedy).chain(logits, advance, memory)
        return draft, _joined(memory, jnp.where(fed >= context.length - 2, context.length, fed))

    def _grow(self, keys: Array, context: Context, sampling: Sampling, state: Memory) -> tuple[DraftTree, Memory]:
        """Draw a tree for every row, and return it and the new state.

        The first call feeds the last D + 1 committed tokens, as the draft model keeps no node of the tree before. For
        each further level one call feeds the nodes that get children, which see their ancestors alone.
        """
        memory, fed = _parts(state)
        width = self.num_draft_tokens + 1
        start = jnp.maximum(context.length - width, 0)
        output, memory = self._run(_committed(context, start, width), memory)
        logits = jnp.take_along_axis(output.logits, (context.length - 1 - start)[:, None, None], axis=1)

        def advance(fed: DraftTree, num_new: int, memory: Memory) -> tuple[Array, Memory]:
            output, memory = self._run(tree_steps.drafts_fed(context, fed), memory)
            return output.logits[:, -num_new:], memory

        tree, memory = tree_drawer_of(self, keys, context, sampling).grow(logits, advance, memory)
        return tree, _joined(memory, jnp.where(fed >= context.length - width, context.length, fed))

    def _draft_from_state(
        self, speculates: Array, keys: Array, context: Context, sampling: Sampling, state: Memory
    ) -> tuple[Draft, Memory]:
        """Draw K tokens as `_draft` does, with a draft model that keeps a recurrent state.

        The first call feeds the committed tokens that are new, K + 1 at most, and the state after them is kept. The
        state that goes on over the drafts is a copy, which ends with the step: no rejected draft can be in the next.
        """
        memory, fed = _parts(state)
        width = self.num_draft_tokens + 1
        count = jnp.where(speculates, jnp.clip(context.length - fed, 0, width), 0)
        inputs = _committed(context, fed, width)._replace(num_tokens=count)
        output, kept = self._run(inputs, memory)
        logits = jnp.take_along_axis(output.logits, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        one = speculates.astype(jnp.int32)

        def advance(token: Array, index: Array, memory: Memory) -> tuple[Array, Memory]:
            places = context.length[:, None] + index - 1
            output, memory = self._run(ModelInput(token, places, pages=context.pages, num_tokens=one), memory)
            return output.logits, memory

        draft, drafted = Drawer(keys, context, sampling, self.is_greedy).chain(logits, advance, kept)
        return draft, _joined(Memory(drafted.pools, kept.rows), fed + count)


def _joined(memory: Memory, fed: Array) -> Memory:
    """Return the memory of the draft model with the number of tokens [B] that it has been fed."""
    return Memory(memory.pools, (memory.rows, fed))


def _parts(state: Memory) -> tuple[Memory, Array]:
    """Take a state of `_joined` apart."""
    rows, fed = state.rows
    return Memory(state.pools, rows), fed


def _committed(context: Context, start: Array, num_tokens: int) -> ModelInput:
    """Return `num_tokens` committed tokens of each row from position `start` [B] on.

    Past the end they are token 0, in slots of the cache that are overwritten later.
    """
    positions = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(positions, context.tokens.shape[1] - 1), axis=1)
    return ModelInput(jnp.where(positions < context.length[:, None], tokens, 0), positions, pages=context.pages)


def draft_model(
    model: Model,
    num_draft_tokens: int,
    max_length: int | None = None,
    *,
    temperature: float | Array | None = None,
    speculate_below: int | None = None,
    tree: int | None = None,
    coupled: bool = False,
) -> DraftModel:
    """Draft with a small model of the target's vocabulary.

    A row speculates if it is active and length + num_draft_tokens < max_length. The other rows get no drafts and decode
    one token per step. The draft model does not run in a step where no row speculates. Drafts are drawn by all sampling
    parameters of their request, and report the distribution that they were drawn from.

    Args:
        model: the draft model.
        num_draft_tokens: K >= 1.
        max_length: the most tokens of a sequence that the draft model takes; None is the model's own limit. With pages,
            it uses the part of a row's table that covers this length.
        temperature: the temperature of drafts, for requests that are not greedy. None takes the temperature of the
            request. A number, or one number per row [B], replaces it. 0 makes greedy drafts for all requests; these are
            deterministic and report no distribution.
        speculate_below: rows speculate only while fewer rows than this number are active, because a large batch keeps
            the device busy without speculation; None always speculates. The drafts of a row then depend on the other
            rows of its batch. The distribution of its output does not, but only under `verifiers.match` does a seed
            give the same tokens in any batch.
        tree: N, the number of nodes of a tree, in place of a chain: the last committed token is node 0, and a path has
            up to num_draft_tokens drafts. An integer > num_draft_tokens. A row speculates if length + N <= max_length.
        coupled: whether the siblings of a tree are the tokens that come first with the noise of the target's own draw,
            of which `verifiers.match` accepts most; the tree then has no distribution. False draws them from the
            distribution that the tree reports, for `rejection` and `block`.

    Returns:
        A proposer.

    Raises:
        ValueError: `model` is no Model, a number is out of its range, or `max_length` exceeds the limit of the model.
    """
    if not isinstance(model, Model):
        raise ValueError(f"model must be a Model, got {type(model).__name__}")
    if model.init_rows is not None and model.commit is None:
        raise ValueError("model must have commit to draft, as it keeps more than slots: its init_rows is not None")
    values, is_greedy = draft_options(num_draft_tokens, temperature)
    if max_length is None:
        max_length = model.max_length
    elif not (is_integer(max_length) and max_length >= 1):
        raise ValueError(f"max_length must be None or an integer >= 1, got {max_length!r}")
    elif model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the draft model's {model.max_length}, got {max_length}")
    if not (speculate_below is None or (is_integer(speculate_below) and speculate_below >= 1)):
        raise ValueError(f"speculate_below must be None or >= 1, got {speculate_below!r}")
    drafter = DraftModel(
        model,
        int(num_draft_tokens),
        as_python(max_length),
        temperature=values,
        is_greedy=is_greedy,
        speculate_below=speculate_below,
        may_pause=speculate_below is not None,
    )
    return in_tree(drafter, tree, coupled)
