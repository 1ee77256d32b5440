"""Drafts from a small model: a multi-step worker, with the split of rows that may not speculate."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions, prompts
from specjax import keys as streams
from specjax.sampling import Sampling, process
from specjax.types import Array, Categorical, Context, Draft, Model, ModelInput, PyTree, Verified, is_integer
from specjax.verifiers import kernels

CATCH_UP = 16  # tokens a call that feeds what was committed while the draft did not run


class Fed(NamedTuple):
    """What the draft has seen."""

    cache: PyTree
    length: Array  # [B] int32, committed tokens whose slots in the cache are right


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "temperature"],
    meta_fields=["num_draft_tokens", "max_length", "is_greedy", "speculate_below", "may_pause"],
)
@dataclass(frozen=True)
class DraftModel:
    """Makes K tokens with a draft model, shaped by the request's own sampling parameters."""

    model: Model
    num_draft_tokens: int
    max_length: int | None
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    speculate_below: int | None = None
    may_pause: bool = False  # rows may go on without this draft and come back: what they miss is fed then

    def init(self, batch_size: int, max_length: int) -> Fed:
        limit = max_length if self.max_length is None else min(max_length, self.max_length)
        return Fed(self.model.init_cache(batch_size, limit), jnp.zeros(batch_size, jnp.int32))

    def prefill(self, context: Context, features: Any, state: Fed) -> Fed:
        return Fed(prompts.feed(self.model, context, state.cache)[0], jnp.copy(context.length))

    def propose(self, keys: Array, context: Context, sampling: Sampling, state: Fed) -> tuple[Draft, Fed]:
        last_length = context.tokens.shape[1] - 1
        is_limited = self.max_length is not None and last_length + self.num_draft_tokens >= self.max_length
        speculates = context.active
        if is_limited:
            speculates &= context.length + self.num_draft_tokens < self.max_length
        if self.speculate_below is not None:
            speculates &= jnp.sum(context.active) < self.speculate_below
        if self.may_pause:
            state = self._catch_up(context, speculates, state)
        noise = streams.stream(keys[:, :1], streams.DRAFT, jnp.arange(self.num_draft_tokens)[None])
        operands = noise, context, self._shaping(sampling), state
        if is_limited or self.speculate_below is not None:
            (tokens, distribution), state = run_where(speculates, self._draft, *operands)
        else:
            (tokens, distribution), state = self._draft(*operands)
        tokens = jnp.where(speculates[:, None], tokens, -1)
        return Draft(tokens, distribution, jnp.where(speculates, self.num_draft_tokens, 0).astype(jnp.int32)), state

    def update(self, context: Context, verified: Verified, features: Any, state: Fed) -> Fed:
        drafted = jnp.minimum(verified.num_accepted, self.num_draft_tokens - 1)  # the last draft was not fed
        length = jnp.where(state.length == context.length, context.length + drafted, state.length)
        return state._replace(length=length)

    def _catch_up(self, context: Context, speculates: Array, state: Fed) -> Fed:
        """Feed what was committed in steps without this draft, to the rows that speculate again."""

        def is_behind(state: Fed) -> Array:
            return jnp.any(speculates & (state.length < context.length - 2))

        def feed(state: Fed) -> Fed:
            inputs = _committed(context, state.length, CATCH_UP)
            cache = self.model.apply(self.model.params, inputs, state.cache)[1]
            return Fed(cache, jnp.minimum(state.length + CATCH_UP, context.length))

        return jax.lax.while_loop(is_behind, feed, state)

    def _shaping(self, sampling: Sampling) -> Sampling:
        """The sampling parameters of the drafts."""
        if self.is_greedy:
            return sampling._replace(temperature=None, top_k=None, top_p=None, min_p=None)
        if self.temperature is None:
            return sampling
        temperature = jnp.broadcast_to(self.temperature, sampling.max_tokens.shape)
        if sampling.temperature is not None:
            temperature = jnp.where(sampling.temperature > 0, temperature, 0)
        return sampling._replace(temperature=temperature)

    def _draft(self, keys: Array, context: Context, sampling: Sampling, state: Fed):
        """Feed the last two committed tokens again, then each draft but the last.

        After full acceptance the last draft is committed without having been fed; feeding two tokens closes that gap.
        """
        start = jnp.maximum(context.length - 2, 0)
        output, cache = self.model.apply(self.model.params, _committed(context, start, 2), state.cache)
        last = (context.length - 1 - start)[:, None, None]  # 0 for a context of one token, whose second is padding
        logits = jnp.take_along_axis(output.logits, last, axis=1)
        drafts = jnp.full((context.length.shape[0], self.num_draft_tokens), -1, jnp.int32)
        token, row = self._draw(keys[:, :1], process(sampling, logits, context, drafts, 0))
        drafts = drafts.at[:, :1].set(token)
        width = self.num_draft_tokens
        stacked = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width - 1), (0, 0))[: x.ndim]), row)

        def body(carry, index):
            drafts, rows, cache = carry
            token = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, axis=1)
            inputs = ModelInput(token, context.length[:, None] + index - 1)
            output, cache = self.model.apply(self.model.params, inputs, cache)
            key = jax.lax.dynamic_slice_in_dim(keys, index, 1, axis=1)
            token, row = self._draw(key, process(sampling, output.logits, context, drafts, index))
            drafts = jax.lax.dynamic_update_slice_in_dim(drafts, token, index, axis=1)
            rows = jax.tree.map(
                lambda all_rows, one: jax.lax.dynamic_update_slice_in_dim(all_rows, one, index, axis=1), rows, row
            )
            return (drafts, rows, cache), None

        (drafts, rows, cache), _ = jax.lax.scan(body, (drafts, stacked, cache), jnp.arange(1, width), unroll=True)
        distribution = None if rows is None else rows._replace(temperature=sampling.temperature)
        length = jnp.where(state.length >= context.length - 2, context.length, state.length)
        return (drafts, distribution), Fed(cache, length)

    def _draw(self, key: Array, row: Categorical) -> tuple[Array, Categorical | None]:
        """A token [B, 1] of a row, and what of the row has one entry a draft; None for a deterministic draft."""
        if self.is_greedy:
            return distributions.normalize(row, argmax=True).argmax, None
        return kernels.draw(key, row), row._replace(temperature=None)


def _committed(context: Context, start: Array, num_tokens: int) -> ModelInput:
    """So many committed tokens from `start` [B] on; token 0 past the end, in slots that are overwritten later."""
    positions = start[:, None] + jnp.arange(num_tokens)[None]
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(positions, context.tokens.shape[1] - 1), axis=1)
    return ModelInput(jnp.where(positions < context.length[:, None], tokens, 0), positions)


def run_where(rows: Array, function: Callable[..., tuple[PyTree, PyTree]], *operands: Any) -> tuple[PyTree, PyTree]:
    """Call `function(*operands) -> (drafts, state)` if any of the rows [B] is true.

    If not, the drafts are zeros, which stand for nothing, and the state is the last operand.
    """

    def skip(*operands: Any) -> tuple[PyTree, PyTree]:
        drafts, _ = jax.eval_shape(function, *operands)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafts), operands[-1]

    return jax.lax.cond(jnp.any(rows), function, skip, *operands)


def draft_model(
    model: Model,
    num_draft_tokens: int,
    max_length: int | None = None,
    *,
    temperature: float | Array | None = None,
    speculate_below: int | None = None,
) -> DraftModel:
    """Draft with a small model of the target's vocabulary.

    A row speculates iff it is active and length + num_draft_tokens < max_length; the others get no drafts and decode
    normally. Where no row speculates the draft is not run. Drafts are shaped by all that the request asks of its
    output, and report the law that they were drawn from.

    Args:
        model: the draft model.
        num_draft_tokens: K >= 1.
        max_length: of the sequences that the draft takes; None is the model's own limit.
        temperature: of the drafts of requests that are not greedy: None is the request's own; 0 makes greedy drafts
            for all, deterministic ones, which report no distribution; a number, or one a row [B], is used instead of
            the request's.
        speculate_below: rows speculate while fewer than so many are active, None always: a large batch keeps the
            device busy without. The drafts that a row gets then depend on its neighbours: its law does not, but a seed
            fixes its tokens in any batch under `verifiers.match` alone.

    Returns:
        A proposer.

    Raises:
        ValueError: for a number out of its range, or where max_length exceeds the model's.
    """
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 1):
        raise ValueError(f"num_draft_tokens must be >= 1 (use proposers.none() for 0), got {num_draft_tokens!r}")
    if max_length is None:
        max_length = model.max_length
    elif not (is_integer(max_length) and max_length >= 1):
        raise ValueError(f"max_length must be None or an integer >= 1, got {max_length!r}")
    elif model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the draft model's {model.max_length}, got {max_length}")
    if not (speculate_below is None or (is_integer(speculate_below) and speculate_below >= 1)):
        raise ValueError(f"speculate_below must be None or >= 1, got {speculate_below!r}")
    is_greedy = False
    if temperature is not None:
        values = np.asarray(temperature)
        is_number = values.ndim <= 1 and np.issubdtype(values.dtype, np.number)
        if not is_number or not np.all((values >= 0) & np.isfinite(values)):
            raise ValueError(
                f"temperature must be None, or a number or numbers [B], finite and >= 0, got {temperature!r}"
            )
        is_greedy = not values.any()
        temperature = None if is_greedy else jnp.asarray(values, jnp.float32)
    return DraftModel(
        model,
        num_draft_tokens,
        max_length,
        temperature,
        is_greedy,
        speculate_below,
        may_pause=speculate_below is not None,
    )
