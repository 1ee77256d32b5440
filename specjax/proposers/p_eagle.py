"""Drafts of P-EAGLE: an EAGLE-3 head that makes all of them in one pass over rows of a mask token."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.drafters import InMemory, check_draft_length
from specjax.operations.pieces import after
from specjax.proposers.drawing import Reduced, draft_options, drawer_of, only_in
from specjax.proposers.eagle3 import Eagle3Head
from specjax.proposers.feature_draft import committed, has_feature, last_fed, row_of
from specjax.proposers.none import Paused
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, Memory, ModelInput, PyTree, Verified
from specjax.validation import is_integer


class Pending(NamedTuple):
    """The rows of the head's memory: the last committed tokens may not have been fed yet; their features wait here."""

    features: Array  # [B, W, h] of the tokens before the tokens that wait
    count: Array  # [B] int32 in [1, W], number of last tokens that wait


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "reduced", "temperature"],
    meta_fields=["head", "mask_token", "num_draft_tokens", "is_greedy", "may_pause"],
)
@dataclass(frozen=True)
class ParallelEagle(InMemory):
    """A proposer whose head runs once in each step: over the accepted tokens, then over K - 1 rows of a mask token."""

    head: Eagle3Head
    params: PyTree  # a dict of the head's parameters, among them `embedding` [V, h] and `mask_taps` [N H]
    mask_token: int
    num_draft_tokens: int
    reduced: Reduced | None = None
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    may_pause: bool = False  # steps may pass without `propose`; tokens are then fed as soon as they are verified
    takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "ParallelEagle | Paused":
        check_draft_length(num_draft_tokens)
        pausing = replace(self, may_pause=self.may_pause or may_pause)
        return replace(pausing, num_draft_tokens=num_draft_tokens) if num_draft_tokens else Paused(pausing)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        dtype, width = self.params["embedding"].dtype, 1 if self.may_pause else self.num_draft_tokens + 1
        features = jnp.zeros((batch_size, width, self.head.hidden_size), dtype)
        cache = self.head.init_cache(num_pages, page_size, dtype)
        return Memory(cache, Pending(features, jnp.ones(batch_size, jnp.int32)))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        feature = self.head.feature(self.params, after(inputs, previous, features))
        _, cache = self.head(self.params, inputs, feature, state.pools)
        held = state.take(inputs.sequences).rows
        own = held.features.at[:, 0].set(last_fed(inputs, feature, held.features[:, 0]))
        return state.put(inputs.sequences, Memory(cache, Pending(own, jnp.ones_like(held.count))))

    def propose(self, keys: Array, context: Context, sampling: Sampling, state: Memory) -> tuple[Draft, Memory]:
        width = self.num_draft_tokens
        inputs, feature = self._rows(context, state.rows)
        output, cache = self.head(self.params, inputs, feature, state.pools)
        index = jnp.maximum(state.rows.count - 1, 0)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        logits = self.head.logits(self.params, jnp.take_along_axis(output, index[..., None], axis=1))
        draft = drawer_of(self, keys, context, sampling, self.reduced).parallel(logits)
        return only_in(has_feature(context), draft), Memory(cache, state.rows)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        feature = self.head.feature(self.params, features)
        inputs, last = committed(context, verified)
        held, is_active = state.rows, context.active[:, None, None]
        if self.may_pause:
            _, cache = self.head(self.params, inputs, feature, state.pools)
            feature = jnp.where(is_active, row_of(feature, last), held.features)
            return Memory(cache, Pending(feature, held.count))
        feature = jnp.where(is_active, feature, held.features)
        count = jnp.where(context.active, last + 1, held.count).astype(jnp.int32)
        return Memory(state.pools, Pending(feature, count))

    def _rows(self, context: Context, state: Pending) -> tuple[ModelInput, Array]:
        """Return the tokens that wait, then mask tokens, and the input of each from the target's features.

        They are so many that the last token of every row has K - 1 mask tokens after it.
        """
        index = jnp.arange(state.features.shape[1] + self.num_draft_tokens - 1, dtype=jnp.int32)[None]
        # In a row that is not active, slots before the last may hold a prompt that is being fed.
        count = jnp.where(context.active, state.count, 1)
        slots = jnp.maximum(context.length - count, 0)[:, None] + index
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(slots, context.tokens.shape[1] - 1), axis=1)
        is_known = index < count[:, None]
        masked = self.head.fuse(self.params, self.params["mask_taps"][None, None])
        feature = jnp.pad(state.features, ((0, 0), (0, self.num_draft_tokens - 1), (0, 0)))
        feature = jnp.where(is_known[..., None], feature, masked)
        return ModelInput(jnp.where(is_known, tokens, self.mask_token), slots, pages=context.pages), feature


def p_eagle(
    head: Eagle3Head,
    params: PyTree,
    num_draft_tokens: int,
    *,
    mask_token: int,
    reduced: Reduced | None = None,
    temperature: float | Array | None = None,
) -> ParallelEagle:
    """Draft with a head of P-EAGLE, which makes K drafts in one pass.

    `eagle3` describes the other arguments; `params` also have `mask_taps` [N H], input of mask tokens in place of the
    target's residual stream.

    Args:
        mask_token: the id of the mask token in the embedding.

    Raises:
        ValueError: a number is out of its range.

    References:
        P-EAGLE: Parallel-Drafting EAGLE with Scalable Training, 2026.
    """
    values, is_greedy = draft_options(num_draft_tokens, temperature)
    rows = params["embedding"].shape[0]
    if not (is_integer(mask_token) and 0 <= mask_token < rows):
        raise ValueError(f"mask_token must be in [0, {rows}), the rows of the embedding, got {mask_token!r}")
    return ParallelEagle(head, params, mask_token, int(num_draft_tokens), reduced, values, is_greedy)
