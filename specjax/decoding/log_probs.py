"""Log-probabilities of chosen tokens and of the most likely tokens, and buffers in which decoding collects them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.operations.top_k import top_k
from specjax.parallel import shards
from specjax.types import Array, Categorical
from specjax.validation import check_array, check_categorical, is_integer

__all__ = ["LogProbs", "logprobs", "record", "zeros"]


class LogProbs(NamedTuple):
    """Log-probabilities of chosen tokens, and the n most likely tokens of each row."""

    chosen: Array  # [B, T] float32, log-probability of each chosen token; 0 where the token is -1
    rank: Array | None  # [B, T] int32, 1 + the number of likelier tokens; 0 where the token is -1; None in a buffer
    top_ids: Array  # [B, T, n] int32, the most likely token first; of equally likely ones, the lower id first
    top: Array  # [B, T, n] float32, log-probabilities of top_ids


def logprobs(logits: Categorical | Array, tokens: Array, n: int = 0, *, axis_name: str | None = None) -> LogProbs:
    """Compute log-probabilities of chosen tokens, and the n most likely tokens of each row.

    The distribution is the one that is given: the softmax of a model's logits, or the one that `sampling.process`
    makes of them.

    Args:
        logits: [B, T, V] float32 or bfloat16, where -inf excludes a token; or a Categorical.
        tokens: [B, T] int32, such as `Verified.tokens`; -1 stands for no token. An id >= V counts as a token of
            probability 0: its log-probability is -inf, and its rank comes after the ranks of all possible tokens.
        n: how many of the most likely tokens to list, static.
        axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static: each gives its own part
            [B, T, V / n] of the logits. None is a whole vocabulary.

    Returns:
        LogProbs.

    Raises:
        ValueError: an array has a wrong shape or dtype, or n is not an integer in [0, V].

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[[0.5, 0.125, 0.375], [0.25, 0.25, 0.5]]]))
        >>> result = logprobs(logits, jnp.array([[2, -1]]), n=2)
        >>> round(float(result.chosen[0, 0]), 3), result.rank
        (-0.981, Array([[2, 0]], dtype=int32))
        >>> result.top_ids
        Array([[[0, 2],
                [2, 0]]], dtype=int32)
    """
    target, tokens = jax.tree.map(jnp.asarray, (distributions.as_categorical(logits), tokens))
    check_categorical("logits", target, "T", (None, None))
    *rows, vocab_size = distributions.shape_of(target)
    check_array("tokens", tokens, "[B, T]", tuple(rows), jnp.integer)
    if not (is_integer(n) and 0 <= n <= vocab_size):
        raise ValueError(f"n must be an integer in [0, V = {vocab_size}], got {n!r}")
    tokens = tokens.astype(jnp.int32)
    normalized = distributions.normalize(target, axis_name=axis_name)
    kept = distributions.kept_logits(target)
    index = tokens - shards.first_id(vocab_size, axis_name)
    is_own = (index >= 0) & (index < vocab_size)
    chosen = jnp.take_along_axis(kept, jnp.where(is_own, index, 0)[..., None], axis=-1)[..., 0]
    chosen = shards.of_owner(chosen, is_own, axis_name)
    chosen = jnp.where(tokens < vocab_size * shards.num_shards(axis_name), chosen, -jnp.inf)[..., None]
    num_above = shards.total(jnp.sum(kept > chosen, axis=-1).astype(jnp.float32), axis_name)
    top_ids = top_k(kept, n)[1]
    top = distributions.log_probs(normalized, top_ids).astype(jnp.float32)
    if axis_name is not None:
        top_ids, top = _most_likely(top_ids + shards.first_id(vocab_size, axis_name), top, axis_name)
    has_token = tokens >= 0
    return LogProbs(
        chosen=jnp.where(has_token, distributions.token_log_prob(normalized, tokens), 0).astype(jnp.float32),
        rank=jnp.where(has_token, 1 + num_above.astype(jnp.int32), 0),
        top_ids=top_ids,
        top=top,
    )


def _most_likely(ids: Array, log_prob: Array, axis_name: str) -> tuple[Array, Array]:
    """Return the n most likely tokens [B, T, n] of those that each device lists, and their log-probabilities."""
    own = jnp.stack([ids.astype(jnp.float32), log_prob])
    listed = jnp.moveaxis(shards.table(own, axis_name), 0, -2)  # [2, B, T, devices, n]
    ids, log_prob = listed.reshape(*listed.shape[:-2], -1)
    top, place = jax.lax.top_k(log_prob, own.shape[-1])
    return jnp.take_along_axis(ids, place, axis=-1).astype(jnp.int32), top


def zeros(batch_size: int, max_length: int, n: int) -> LogProbs:
    """Return an empty buffer for B sequences of at most L tokens: fields [B, L] and [B, L, n], without ranks."""
    shape = batch_size, max_length
    floats = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, n), jnp.float32)
    return LogProbs(floats[0], None, jnp.zeros((*shape, n), jnp.int32), floats[1])


def record(
    buffer: LogProbs,
    slots: Array,
    tokens: Array,
    target: Categorical | Array,
    rows: Array | None = None,
    *,
    axis_name: str | None = None,
) -> LogProbs:
    """Write the log-probabilities of tokens to a buffer.

    Args:
        buffer: made by `zeros`.
        slots: [B, T] int32, the index of each token in its sequence; not read where the token is -1.
        tokens: [B, T] int32; -1 stands for no token.
        target: the distribution of each token, a Categorical or logits [B, T, V].
        rows: [B] int32, the row of the buffer for each row, or the number of its rows, where nothing is written; None
            is the same row.
        axis_name: as `logprobs` takes it.

    Returns:
        The new buffer.
    """
    size, n = buffer.top.shape[1:]
    entries = logprobs(target, tokens, n, axis_name=axis_name)._replace(rank=None)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32) if rows is None else rows
    at = rows[:, None], jnp.where(tokens >= 0, slots, size)
    return jax.tree.map(lambda array, entry: array.at[at].set(entry, mode="drop"), buffer, entries)
