"""Drafts from a small model: a multi-step worker, with the split of rows that may not speculate."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax import distributions, prompts
from specjax import keys as streams
from specjax.sampling import Sampling, process
from specjax.types import Array, Categorical, Context, Draft, Model, ModelInput, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=["model"], meta_fields=["num_draft_tokens", "max_length"])
@dataclass(frozen=True)
class DraftModel:
    """Samples K tokens from a draft model, each from the draft's law under the request's own sampling parameters."""

    model: Model
    num_draft_tokens: int
    max_length: int | None

    def init(self, batch_size: int, max_length: int) -> PyTree:
        limit = max_length if self.max_length is None else min(max_length, self.max_length)
        return self.model.init_cache(batch_size, limit)

    def prefill(self, context: Context, features: Any, state: PyTree) -> PyTree:
        return prompts.feed(self.model, context, state)

    def propose(self, keys: Array, context: Context, sampling: Sampling, state: PyTree) -> tuple[Draft, PyTree]:
        speculates = context.active
        operands = (
            streams.stream(keys[:, :1], streams.DRAFT, jnp.arange(self.num_draft_tokens)[None]),
            context,
            sampling,
            state,
        )
        buffer_size = context.tokens.shape[1]
        if self.max_length is None or buffer_size - 1 + self.num_draft_tokens < self.max_length:
            tokens, distribution, state = self._draft(*operands)
        else:
            speculates &= context.length + self.num_draft_tokens < self.max_length
            tokens, distribution, state = jax.lax.cond(jnp.any(speculates), self._draft, self._skip, *operands)
        tokens = jnp.where(speculates[:, None], tokens, -1)
        return Draft(tokens, distribution, jnp.where(speculates, self.num_draft_tokens, 0).astype(jnp.int32)), state

    def update(self, context: Context, verified: Verified, features: Any, state: PyTree) -> PyTree:
        return state

    def _draft(self, keys: Array, context: Context, sampling: Sampling, cache: PyTree):
        """Feed the last two committed tokens again, then each draft but the last.

        After full acceptance the last draft is committed without having been fed; feeding two tokens closes that gap.
        """
        start = jnp.maximum(context.length - 2, 0)[:, None]
        positions = start + jnp.arange(2)[None]
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(positions, context.tokens.shape[1] - 1), axis=1)
        tokens = jnp.where(positions < context.length[:, None], tokens, 0)
        output, cache = self.model.apply(self.model.params, ModelInput(tokens, positions), cache)
        last = (context.length[:, None] - 1 - start)[..., None]  # 0 for a context of one token, whose second is padding
        logits = jnp.take_along_axis(output.logits, last, axis=1)
        drafts = jnp.full((context.length.shape[0], self.num_draft_tokens), -1, jnp.int32)
        first = process(sampling, logits, context, drafts, 0)
        drafts = drafts.at[:, :1].set(distributions.sample(keys[:, :1], first))
        width = self.num_draft_tokens
        stacked = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width - 1), (0, 0))[: x.ndim]), _rows(first))

        def body(carry, index):
            drafts, rows, cache = carry
            token = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, axis=1)
            inputs = ModelInput(token, context.length[:, None] + index - 1)
            output, cache = self.model.apply(self.model.params, inputs, cache)
            row = process(sampling, output.logits, context, drafts, index)
            key = jax.lax.dynamic_slice_in_dim(keys, index, 1, axis=1)
            drafts = jax.lax.dynamic_update_slice_in_dim(drafts, distributions.sample(key, row), index, axis=1)
            rows = jax.tree.map(
                lambda all_rows, one: jax.lax.dynamic_update_slice_in_dim(all_rows, one, index, axis=1),
                rows,
                _rows(row),
            )
            return (drafts, rows, cache), None

        (drafts, rows, cache), _ = jax.lax.scan(body, (drafts, stacked, cache), jnp.arange(1, width), unroll=True)
        return drafts, rows._replace(temperature=sampling.temperature), cache

    def _skip(self, keys: Array, context: Context, sampling: Sampling, cache: PyTree):
        shapes = jax.eval_shape(self._draft, keys, context, sampling, cache)
        tokens, distribution, _ = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return tokens, distribution, cache


def _rows(distribution: Categorical) -> Categorical:
    """The fields that have one entry a row."""
    return distribution._replace(temperature=None)


def draft_model(model: Model, num_draft_tokens: int, max_length: int | None = None) -> DraftModel:
    """Draft with a small model of the target's vocabulary.

    A row speculates iff it is active and length + num_draft_tokens < max_length; the others get no drafts and decode
    normally. Where no row speculates the draft is not run.

    Args:
        model: the draft model.
        num_draft_tokens: K >= 1.
        max_length: of the sequences that the draft takes; None is the model's own limit.

    Returns:
        A proposer.

    Raises:
        ValueError: where num_draft_tokens < 1 or max_length exceeds the model's.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be >= 1 (use proposers.none() for 0), got {num_draft_tokens}")
    if max_length is None:
        max_length = model.max_length
    elif model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the draft model's {model.max_length}, got {max_length}")
    return DraftModel(model, num_draft_tokens, max_length)
