"""Feed prompts to the target and to a proposer, chunk by chunk."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from specjax.calls import run
from specjax.dispatch import is_partitioned
from specjax.log_probs import LogProbs, record
from specjax.loops import as_carry
from specjax.types import NO_PAGE, Array, Chunk, Context, Model, ModelInput, Proposer, PyTree

BUDGET = 2048  # tokens of a call that holds some rows of a batch
CHUNK = 256  # tokens of a prompt in a call; on a GPU more, where the rows are too few for BUDGET

_Fed = tuple[PyTree, PyTree, LogProbs | None]  # the cache, the proposer's state and the log-probabilities


def feed_chunk(
    model: Model,
    proposer: Proposer,
    chunk: Chunk,
    cache: PyTree,
    proposer_state: PyTree,
    log_probs: LogProbs | None = None,
) -> tuple[PyTree, PyTree, PyTree, LogProbs | None]:
    """Feed one chunk of some prompts to the target, and then, with its features, to the proposer.

    A prompt may begin at any chunk whose predecessors are in its pages. Calls of one shape, the last one padded, then
    give the same numbers to the bit, wherever the prompt began.

    The logits are used only for the log-probabilities of the prompt; without `log_probs` nothing reads them.

    Args:
        model: the target.
        proposer: the proposer.
        chunk: the chunk; `previous` is what the call before returned, and None at the start of the prompts.
        cache: the target's cache.
        proposer_state: the proposer's state.
        log_probs: a buffer that gets the log-probability of prompt token i under the model in slot i, for i >= 1. Its
            rows are those of the batch.

    Returns:
        The cache, the proposer's state, the features of the last token of each row [B, ...], and the buffer. Padding of
        a chunk is in slots that are overwritten before any token sees them.
    """
    cache, proposer_state, last, logits = run_chunk(model, proposer, chunk, cache, proposer_state)
    if log_probs is not None:
        given = log_probs, chunk.positions + 1, chunk.following, logits, chunk.rows
        log_probs = record(*given, axis_name=model.axis_name)
    return cache, proposer_state, last, log_probs


def run_chunk(
    model: Model, proposer: Proposer, chunk: Chunk, cache: PyTree, proposer_state: PyTree
) -> tuple[PyTree, PyTree, PyTree, Array]:
    """Do as `feed_chunk` does, and return the logits [B, T, V] of the chunk in place of a buffer."""
    output, cache = run(model, ModelInput(chunk.tokens, chunk.positions, pages=chunk.pages), cache)
    if chunk.previous is None:
        chunk = chunk._replace(previous=jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), output.features))
    proposer_state = proposer.prefill(chunk, output.features, proposer_state)
    index = jnp.maximum(chunk.num_tokens - 1, 0)

    def last(features: Array, previous: Array) -> Array:
        fed = features[jnp.arange(index.shape[0]), index]
        has_any = (chunk.num_tokens > 0).reshape(-1, *[1] * (fed.ndim - 1))
        return jnp.where(has_any, fed, previous)

    return cache, proposer_state, jax.tree.map(last, output.features, chunk.previous), output.logits


def feed(
    model: Model,
    proposer: Proposer,
    prompts: Context,
    cache: PyTree,
    proposer_state: PyTree,
    *,
    chunk_size: int | None = None,
    log_probs: LogProbs | None = None,
) -> tuple[PyTree, PyTree, LogProbs | None]:
    """Feed prompts to the target and to a proposer, in calls of one static size.

    Where both take pages, a call holds some of the rows, and rows of similar length share their calls: short prompts do
    not pay for long ones. Elsewhere a call holds all rows, and so it does where they may lie on several devices.

    Args:
        model: the target.
        proposer: the proposer.
        prompts: `tokens` [B, W] are the right-padded prompts, `length` [B] their lengths and `pages` their pages.
        cache: the target's cache.
        proposer_state: the proposer's state.
        chunk_size: the most tokens of a prompt in a call; None is 256, and up to 2048 for a few rows on a GPU.
        log_probs: as `feed_chunk` takes it.

    Returns:
        The cache, the proposer's state and the buffer.
    """
    batch_size, width = prompts.tokens.shape
    is_known = isinstance(batch_size, int)  # and not symbolic, as in exported functions
    if chunk_size is None:
        is_cpu = jax.default_backend() == "cpu"
        chunk_size = CHUNK if is_cpu or not is_known else max(CHUNK, BUDGET // max(1, batch_size))
    size = min(chunk_size, width)
    tokens = jnp.where(jnp.arange(width, dtype=jnp.int32)[None] < prompts.length[:, None], prompts.tokens, -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1 + -width % size)), constant_values=-1)
    state = cache, proposer_state, log_probs

    takes_rows = model.takes_pages and getattr(proposer, "takes_pages", False)
    in_groups = takes_rows and is_known and not is_partitioned((prompts, state))
    num_groups = -(-batch_size // max(1, BUDGET // size)) if in_groups else 1
    if num_groups <= 1:
        return _feed_group(model, proposer, size, _Group(tokens, prompts.length, prompts.pages, None), state)

    group_size = -(-batch_size // num_groups)
    order = jnp.argsort(prompts.length, descending=True).astype(jnp.int32)
    order = jnp.pad(order, (0, num_groups * group_size - batch_size), constant_values=batch_size)

    def body(index: Array | int, state: _Fed) -> _Fed:
        rows = jax.lax.dynamic_slice_in_dim(order, index * group_size, group_size)
        pages = rows[:, None]  # of a dense cache, where row b owns page b
        if prompts.pages is not None:
            pages = prompts.pages.at[rows].get(mode="fill", fill_value=NO_PAGE)
        length = prompts.length.at[rows].get(mode="fill", fill_value=0)
        group = _Group(tokens.at[rows].get(mode="fill", fill_value=-1), length, pages, rows)
        return _feed_group(model, proposer, size, group, state)

    return jax.lax.fori_loop(0, num_groups, body, as_carry(partial(body, 0), state, prompts))


@dataclass(frozen=True)
class _Group:
    """The prompts that share their calls."""

    tokens: Array  # [B, W] int32, then -1; W is a multiple of the chunk size, plus 1
    length: Array  # [B] int32
    pages: Array | None  # [B, P] int32
    rows: Array | None  # [B] int32, as in Chunk


def _feed_group(model: Model, proposer: Proposer, size: int, group: _Group, state: _Fed) -> _Fed:
    """Feed the chunks of some prompts, as many as the longest of them has."""

    def chunk_at(index: Array | int, previous: PyTree = None) -> Chunk:
        start = index * size
        tokens, following = (jax.lax.dynamic_slice_in_dim(group.tokens, start + i, size, axis=1) for i in range(2))
        return Chunk(
            jnp.maximum(tokens, 0),
            following,
            jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), tokens.shape),
            jnp.clip(group.length - start, 0, size),
            group.pages,
            group.rows,
            previous,
        )

    def feed_next(chunk: Chunk, state: _Fed) -> tuple[_Fed, PyTree]:
        cache, proposer_state, last, log_probs = feed_chunk(model, proposer, chunk, *state)
        return (cache, proposer_state, log_probs), last

    if group.tokens.shape[1] == size + 1:
        return feed_next(chunk_at(0), state)[0]
    last = jax.eval_shape(lambda state: feed_next(chunk_at(0), state)[1], state)
    previous = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), last)
    num_chunks = (jnp.max(group.length, initial=0) + size - 1) // size

    def body(index: Array | int, carry: tuple[_Fed, PyTree]) -> tuple[_Fed, PyTree]:
        state, previous = carry
        return feed_next(chunk_at(index, previous), state)

    carry = as_carry(partial(body, 0), (state, previous), group.tokens, group.length)
    return jax.lax.fori_loop(0, num_chunks, body, carry)[0]
