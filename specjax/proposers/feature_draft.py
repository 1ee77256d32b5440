"""Drafts from a head on the target's features, which runs K times in each step."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jax.typing import DTypeLike

from specjax.decoding import tree_steps
from specjax.decoding.drafters import check_draft_length
from specjax.operations.pieces import after, at_token
from specjax.proposers.drawing import Reduced, draft_options, drawer_of, only_in
from specjax.proposers.none import Paused
from specjax.proposers.tree_drawing import InTrees, only_root, tree_drawer_of
from specjax.proposers.trunk import FeatureHead, Pick
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, DraftTree, Memory, ModelInput, PyTree, Verified


class Head(Protocol):
    """The functions of a head on features, a frozen dataclass. They take the parameters, a dict, as an argument.

    The inputs of a row are a token and the target's feature of the token before it. After the last feature they are a
    draft and the head's own output for the row before, by `recurrent`. A head with `takes_groups = True` takes packed
    calls, too.
    """

    @property
    def hidden_size(self) -> int:
        """The numbers h of an output."""
        ...

    def feature(self, params: PyTree, features: Any) -> Array:
        """Return the input of rows from the target's features: [B, T, h]."""
        ...

    def __call__(self, params: PyTree, inputs: ModelInput, feature: Array, cache: PyTree) -> tuple[Array, PyTree]:
        """Return the outputs [B, T, h] of the rows with the tokens of `inputs`, and the cache."""
        ...

    def recurrent(self, params: PyTree, output: Array) -> Array:
        """Return the input of a row in place of a feature [B, T, h], given the output of the row before it."""
        ...

    def logits(self, params: PyTree, output: Array) -> Array:
        """Return the logits [B, T, D] float32 of the token after each row."""
        ...

    def init_cache(self, num_pages: int, page_size: int, dtype: DTypeLike) -> PyTree:
        """Return a pool, or the dense cache of `num_pages` rows with `page_size` slots."""
        ...


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "reduced", "temperature"],
    meta_fields=["head", "num_draft_tokens", "is_greedy", "tree", "coupled"],
)
@dataclass(frozen=True)
class FeatureDraft(InTrees):
    """A proposer whose head runs over the committed tokens with the target's features, and over drafts with its own.

    After verification one call feeds the accepted tokens with their true features. Its last output gives the first
    draft of the next step. Slot s of the pools holds keys and values of token s with the feature of token s - 1; the
    rows are [B, h], the head's output for the last committed token.
    """

    head: Head
    params: PyTree  # a dict of the head's parameters, among them `embedding` [V, h]
    num_draft_tokens: int
    reduced: Reduced | None = None
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    tree: int | None = None  # N, the number of nodes; None makes a chain
    coupled: bool = False

    @property
    def takes_groups(self) -> bool:
        return getattr(self.head, "takes_groups", False)

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "FeatureDraft | Paused":
        check_draft_length(num_draft_tokens)
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else Paused(self)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        dtype = self.params["embedding"].dtype
        cache = self.head.init_cache(num_pages, page_size, dtype)
        return Memory(cache, jnp.zeros((batch_size, self.head.hidden_size), dtype))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        feature = self.head.feature(self.params, after(inputs, previous, features))
        held = state.take(inputs.sequences).rows
        output, cache = self._picked(inputs, feature, state.pools, Partial(_last_of, inputs))
        last = jnp.where((inputs.counts > 0)[:, None], output[:, 0], held)
        return state.put(inputs.sequences, Memory(cache, last))

    def _picked(self, inputs: ModelInput, feature: Array, cache: PyTree, pick: Pick) -> tuple[Array, PyTree]:
        """Return outputs of the rows that `pick` keeps; for others the last decoder layer of a head does not end."""
        if isinstance(self.head, FeatureHead):
            return self.head.picked(self.params, inputs, feature, cache, pick)
        output, cache = self.head(self.params, inputs, feature, cache)
        return pick(output), cache

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory
    ) -> tuple[Draft | DraftTree, Memory]:
        if self.tree is not None:
            return self._grow(keys, context, sampling, state)

        def advance(token: Array, index: Array, carry: Memory) -> tuple[Array, Memory]:
            feature = self.head.recurrent(self.params, carry.rows[:, None])
            inputs = ModelInput(token, context.length[:, None] + index - 1, pages=context.pages)
            output, cache = self.head(self.params, inputs, feature, carry.pools)
            return self.head.logits(self.params, output), Memory(cache, output[:, 0])

        logits = self.head.logits(self.params, state.rows[:, None])
        drawer = drawer_of(self, keys, context, sampling, self.reduced)
        draft, last = drawer.chain(logits, advance, state)
        return only_in(has_feature(context), draft), Memory(last.pools, state.rows)

    def _grow(self, keys: Array, context: Context, sampling: Sampling, state: Memory) -> tuple[DraftTree, Memory]:
        """Draw a tree. For each level one call feeds the nodes that get children, which see their ancestors alone."""

        def advance(fed: DraftTree, num_new: int, carry: tuple[PyTree, Array]) -> tuple[Array, tuple[PyTree, Array]]:
            cache, outputs = carry
            inputs = tree_steps.drafts_fed(context, fed)
            of_parents = jnp.take_along_axis(outputs, fed.parents[:, 1:, None], axis=1)
            output, cache = self.head(self.params, inputs, self.head.recurrent(self.params, of_parents), cache)
            outputs = jnp.concatenate([outputs[:, :1], output], axis=1)
            return self.head.logits(self.params, output[:, -num_new:]), (cache, outputs)

        first = state.rows[:, None]  # the output of node 0
        drawer = tree_drawer_of(self, keys, context, sampling, self.reduced)
        tree, (cache, _) = drawer.grow(self.head.logits(self.params, first), advance, (state.pools, first))
        return only_root(has_feature(context), tree), Memory(cache, state.rows)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        inputs, last = committed(context, verified)
        feature = self.head.feature(self.params, features)
        output, cache = self._picked(inputs, feature, state.pools, Partial(row_of, index=last))
        return Memory(cache, jnp.where(context.active[:, None], output[:, 0], state.rows))


def _last_of(inputs: ModelInput, values: Array) -> Array:
    """Return the value [R, 1, h] of the last token of each row or piece, of values [R, T, h]; garbage without one."""
    return at_token(inputs, values, jnp.maximum(inputs.counts - 1, 0))[:, None]


def last_fed(inputs: ModelInput, values: Array, held: Array) -> Array:
    """Return the value [R, h] of the last token of each row or piece, and `held` [R, h] where it has none.

    Args:
        inputs: the chunk, [R, T], or a packed call, [1, C].
        values: of its tokens, [R, T, h].
        held: placeholder for a row without tokens.
    """
    return jnp.where((inputs.counts > 0)[:, None], _last_of(inputs, values)[:, 0], held)


def committed(context: Context, verified: Verified) -> tuple[ModelInput, Array]:
    """Return the verified tokens as they are fed, in the slots after the context, and the index [B] of the last one.

    The target's features in `Proposer.update` belong to the tokens before them. Past the last verified token they
    are garbage, in slots that are overwritten before a token sees them.
    """
    slots = context.length[:, None] + jnp.arange(verified.tokens.shape[1], dtype=jnp.int32)[None]
    inputs = ModelInput(jnp.maximum(verified.tokens, 0), slots, pages=context.pages)
    return inputs, jnp.maximum(jnp.sum(verified.tokens >= 0, axis=1, dtype=jnp.int32) - 1, 0)


def row_of(x: Array, index: Array) -> Array:
    """Return row `index` [B] of each sequence of x [B, T, h], as [B, 1, h]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


def has_feature(context: Context) -> Array:
    """Return the active rows [B] bool that have a token with a feature before it, so that a head can draft for them."""
    return context.active & (context.length >= 2)


def feature_draft(
    head: Head, params: PyTree, num_draft_tokens: int, reduced: Reduced | None, temperature: float | Array | None
) -> FeatureDraft:
    """Return the proposer of a head, after checks of the options; see `draft_options`."""
    values, is_greedy = draft_options(num_draft_tokens, temperature)
    return FeatureDraft(head, params, int(num_draft_tokens), reduced, values, is_greedy)
