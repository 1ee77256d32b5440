"""The effect of sampling parameters on logits.

Plain and speculative decoding, target and draft, all use `process`. It applies, in this order: the request's own logits
processors; logit bias; the masks (allowed tokens, guided decoding, bad words, min_tokens); repetition, frequency and
presence penalties; temperature; min-p; top-k; top-p. `adjust` goes up to the penalties, and reads token ids. `with_cut`
does the rest, and reads nothing but logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from specjax.distributions import widen
from specjax.parallel import shards
from specjax.sampling import guided
from specjax.sampling.arrays import Sampling
from specjax.sampling.cut import min_logit
from specjax.sampling.guided.tables import Guide
from specjax.types import Array, Categorical, Context
from specjax.validation import check_array


def process(
    sampling: Sampling,
    logits: Array,
    context: Context,
    drafts: Array,
    first: Array | int = 0,
    *,
    axis_name: str | None = None,
) -> Categorical:
    """Return the distributions that requests sample from, given the model's logits and the tokens before each row.

    A draft that a mask forbids keeps its place and gets probability 0. If everything is forbidden, a row is all -inf,
    verifiers and samplers return some id in range for it, and the decoding loop ends the row there.

    Args:
        sampling: the sampling parameters of the batch.
        logits: [B, T, V]; row j is for the token at position context.length + first + j.
        context: the prompt and committed tokens, with `guided_state` if the batch is guided.
        drafts: [B, K] int32, the tokens after the context. Row j depends on the first `first + j` of them, at most K.
        first: the index of the first row.
        axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static: each gives its own part
            [B, T, V / n] of the logits, and everything else whole. None is a whole vocabulary.

    Returns:
        Categorical, with logits [B, T, V], or [B, T, V / n].

    Raises:
        ValueError: an argument has a wrong shape or dtype, a grammar has another vocabulary, a guided context has no
            state, or a logits processor returns no logits of its shape or is given a part of a vocabulary.
    """
    logits = adjust(sampling, logits, context, drafts, first, axis_name=axis_name)
    return with_cut(sampling, logits, axis_name=axis_name)


def adjust(
    sampling: Sampling,
    logits: Array,
    context: Context,
    drafts: Array,
    first: Array | int = 0,
    *,
    axis_name: str | None = None,
) -> Array:
    """Return the logits after all that treats tokens by their ids: processors, bias, masks and penalties.

    The arguments, the errors and the shape of the result are the same as for `process`.
    """
    logits, context, drafts = jax.tree.map(jnp.asarray, (logits, context, drafts))
    check_array("logits", logits, "[B, T, V]", (*context.length.shape, None, None), jnp.floating)
    check_array("drafts", drafts, "[B, K]", (*context.length.shape, None), jnp.integer)
    row = (first + jnp.arange(logits.shape[1], dtype=jnp.int32))[None]  # [1, T], number of drafts before each row
    part = _Part(logits.shape[-1], axis_name)
    if sampling.logits_processors is not None:
        if axis_name is not None:
            raise ValueError(f"logits_processors must be None with axis_name={axis_name!r}: they take whole rows")
        logits = _run_processors(sampling.logits_processors, logits, context, drafts, row)
    if sampling.bias_tokens is not None and sampling.bias_values is not None:
        logits = widen(logits)
        logits += part.scatter(sampling.bias_tokens, sampling.bias_values)[:, None].astype(logits.dtype)
    logits = _mask(sampling, logits, context, drafts, first, part)
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    if any(penalty is not None for penalty in penalties):
        logits = _penalize(*penalties, logits, context, drafts, row, part)
    return logits


def with_cut(sampling: Sampling, logits: Array, *, axis_name: str | None = None) -> Categorical:
    """Return the distributions of logits [B, T, V] with each request's temperature, min-p, top-k and top-p.

    The logits may be of any part of the vocabulary that tokens are drawn from, as nothing here depends on ids.

    Args:
        sampling: the sampling parameters of the batch.
        logits: [B, T, V], as `adjust` returns them.
        axis_name: as `process` takes it.
    """
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return Categorical(logits, sampling.temperature)

    def by_row(field: Array | None) -> Array | None:
        if field is None:
            return None
        return jax.lax.stop_gradient(jnp.broadcast_to(field[:, None], logits.shape[:2]))

    cut = min_logit(
        jax.lax.stop_gradient(logits),
        temperature=by_row(sampling.temperature),
        top_k=by_row(sampling.top_k),
        top_p=by_row(sampling.top_p),
        min_p=by_row(sampling.min_p),
        axis_name=axis_name,
    )
    return Categorical(logits, sampling.temperature, cut)


def reads_token_ids(sampling: Sampling) -> bool:
    """Return whether a request may ask `adjust` for something: it then treats tokens differently by their ids."""
    by_logits = "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop_tokens"
    return any(value is not None for name, value in sampling._asdict().items() if name not in by_logits)


def num_generated(context: Context) -> Array:
    """Return the number [B] of committed tokens that do not belong to the prompt."""
    return context.length - _prompt_length(context)


def _prompt_length(context: Context) -> Array:
    return jnp.zeros_like(context.length) if context.prompt_length is None else context.prompt_length


def _run_processors(
    processors: tuple[tuple[Partial, Array], ...], logits: Array, context: Context, drafts: Array, row: Array
) -> Array:
    """Apply to the logits of each row its own logits processors."""
    length = context.length[:, None] + row
    history = _history(context, drafts)[:, None]
    index = jnp.arange(history.shape[-1], dtype=jnp.int32)[None, None]
    one = Context(
        tokens=jnp.where(index < length[..., None], history, -1),
        length=length,
        active=jnp.broadcast_to(context.active[:, None], length.shape),
        prompt_length=jnp.broadcast_to(_prompt_length(context)[:, None], length.shape),
    )
    for function, rows in processors:
        processed = jax.vmap(jax.vmap(function))(logits, one)
        _check_processed(processed, logits, function)
        logits = jnp.where(rows[:, None, None], processed, logits)
    return logits


def _check_processed(processed: Any, logits: Array, function: Partial) -> None:
    """Raise ValueError unless a logits processor has returned logits for the rows that it was given."""
    is_array = isinstance(processed, jax.Array)
    if not (is_array and processed.shape == logits.shape and jnp.issubdtype(processed.dtype, jnp.floating)):
        got = f"{processed.dtype} {processed.shape[2:]}" if is_array else type(processed).__name__
        raise ValueError(
            f"logits_processors must return floating numbers of shape [V] = ({logits.shape[-1]},), got {got} from "
            f"{function.func}"
        )


def _mask(
    sampling: Sampling, logits: Array, context: Context, drafts: Array, first: Array | int, part: "_Part"
) -> Array:
    """Exclude the tokens that a request forbids, by -inf."""
    batch_size, num_rows, _ = logits.shape
    row = (first + jnp.arange(num_rows, dtype=jnp.int32))[None]
    if sampling.allowed_tokens is not None:
        is_allowed = part.contains(sampling.allowed_tokens)
        is_allowed |= jnp.all(sampling.allowed_tokens < 0, axis=1, keepdims=True)
        logits = jnp.where(is_allowed[:, None], logits, -jnp.inf)
    if sampling.guide is not None:
        logits = _guide(sampling.guide, logits, context, drafts, first, part)
    if sampling.bad_words is not None:
        banned = _completing(sampling.bad_words, context, drafts, row)
        index = jnp.arange(batch_size)[:, None, None], jnp.arange(num_rows)[None, :, None]
        logits = logits.at[*index, part.index(banned)].set(-jnp.inf, mode="drop")
    if sampling.min_tokens is not None and sampling.stop_tokens is not None:
        is_early = num_generated(context)[:, None] + row < sampling.min_tokens[:, None]  # [B, T]
        is_stop = part.contains(sampling.stop_tokens)
        masked = jnp.where(is_stop[:, None] & is_early[..., None], -jnp.inf, logits)
        is_left = jnp.any(masked > -jnp.inf, axis=-1, keepdims=True)  # a complete grammar allows only stop tokens
        if part.axis_name is not None:
            is_left = shards.largest(is_left.astype(jnp.float32), part.axis_name) > 0
        logits = jnp.where(is_left, masked, logits)
    return logits


def _guide(guide: Guide, logits: Array, context: Context, drafts: Array, first: Array | int, part: "_Part") -> Array:
    """Exclude the tokens that the grammar of each row forbids."""
    num_parts, vocab_size = shards.num_shards(part.axis_name), guide.token_classes.shape[1]
    if part.size not in (vocab_size // num_parts, shards.part_size(vocab_size, num_parts)):
        raise ValueError(f"guided_decoding must be of V = {part.size * num_parts} tokens, got {vocab_size}")
    if context.guided_state is None:
        raise ValueError("context must have a guided_state [B] where a request is guided, got None")
    guide = jax.tree.map(jnp.asarray, guide)
    states = guided.advance(guide, context.guided_state, drafts)
    states = jax.lax.dynamic_slice_in_dim(states, first, logits.shape[1], axis=1)
    guide = guide._replace(token_classes=shards.own_part(guide.token_classes, part.axis_name))
    return jnp.where(guided.allowed(guide, states), logits, -jnp.inf)


def _completing(bad_words: Array, context: Context, drafts: Array, row: Array) -> Array:
    """Return the last token [B, T, W] of each bad word that it would complete, -1 for the other words."""
    prefix, last = bad_words[:, None, :, :-1], bad_words[:, None, :, -1]
    size = prefix.shape[-1]
    place = jnp.arange(size, dtype=jnp.int32)[None, None]
    position = (context.length[:, None] + row)[..., None] - size + place  # [B, T, M-1]
    is_output = position >= _prompt_length(context)[:, None, None]
    history = _history(context, drafts)[:, None]
    tokens = jnp.where(is_output, jnp.take_along_axis(history, jnp.maximum(position, 0), axis=-1), -1)
    return jnp.where(jnp.all((prefix < 0) | (prefix == tokens[:, :, None]), axis=-1), last, -1)


def _penalize(
    repetition: Array | None,
    frequency: Array | None,
    presence: Array | None,
    logits: Array,
    context: Context,
    drafts: Array,
    row: Array,
    part: "_Part",
) -> Array:
    """Apply the penalties to the logits.

    The committed tokens are counted once, as [B, V]. The drafts, of which there are few, are compared with every token.
    """
    index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    is_prompt = index < _prompt_length(context)[:, None]
    is_output = ~is_prompt & (index < context.length[:, None])
    count = part.scatter(jnp.where(is_output, context.tokens, -1), jnp.int32(1))[:, None]
    ids = shards.first_id(part.size, part.axis_name) + jnp.arange(part.size, dtype=jnp.int32)[None, None]
    for i in range(drafts.shape[1]):
        count = count + ((drafts[:, i, None, None] == ids) & (i < row[..., None])).astype(jnp.int32)  # [B, T, V]
    logits = widen(logits)
    if repetition is not None:
        is_seen = part.contains(jnp.where(is_prompt, context.tokens, -1))[:, None] | (count > 0)
        factor = jnp.where(is_seen, repetition[:, None, None], 1).astype(logits.dtype)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
    if frequency is not None:
        logits -= (frequency[:, None, None] * count.astype(frequency.dtype)).astype(logits.dtype)
    if presence is not None:
        logits -= jnp.where(count > 0, presence[:, None, None], 0).astype(logits.dtype)
    return logits


def _history(context: Context, drafts: Array) -> Array:
    """Return the committed tokens of each row with its drafts right after them, [B, L + K]."""
    num_drafts = drafts.shape[1]
    slot = context.length[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    tokens = jnp.pad(context.tokens, ((0, 0), (0, num_drafts)))
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slot].set(drafts)


class _Part(NamedTuple):
    """The part of the vocabulary that this device holds, which is all of it where `axis_name` is None."""

    size: int
    axis_name: str | None

    def index(self, ids: Array) -> Array:
        """Return the index of each id in this part, and `size` for negative ids and ids of other parts."""
        index = ids - shards.first_id(self.size, self.axis_name)
        return jnp.where((ids < 0) | (index < 0), self.size, index)

    def scatter(self, ids: Array, values: Array) -> Array:
        """Return the sums [B, size] of the values at each id [B, N]; negative ids are left out."""
        rows = jnp.arange(ids.shape[0])[:, None]
        sums = jnp.zeros((ids.shape[0], self.size), values.dtype)
        return sums.at[rows, self.index(ids)].add(values, mode="drop")

    def contains(self, ids: Array) -> Array:
        """Return which tokens [B, size] are among the ids [B, N]; negative ids are left out."""
        return self.scatter(ids, jnp.int32(1)) > 0
