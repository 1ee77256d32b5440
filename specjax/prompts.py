"""Feed prompts to the target and to a proposer, chunk by chunk."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.calls import run
from specjax.decoding.drafters import in_memory
from specjax.decoding.log_probs import LogProbs, record
from specjax.operations.dispatch import has_static_shape, is_partitioned
from specjax.operations.pieces import at_token
from specjax.parallel.loops import as_carry
from specjax.types import NO_PAGE, Array, Context, Memory, Model, ModelInput, Proposer, PyTree

BUDGET = 2048  # tokens of a call that holds some rows of a batch
CHUNK = 256  # tokens of a prompt in a call; on a GPU more, where the rows are few
LONG = 8192  # tokens of a call of few rows on a GPU, which reads or decodes each matrix once for all of them


class Fed(NamedTuple):
    """State of a model and a proposer after prompts or chunks of prompts."""

    cache: Memory  # the target's
    proposer: Memory  # the proposer's
    log_probs: LogProbs | None  # of the tokens of the prompts; None if not asked for


def feed_chunk(
    model: Model,
    proposer: Proposer,
    inputs: ModelInput,
    following: Array,
    previous: PyTree,
    fed: Fed,
) -> tuple[Fed, PyTree]:
    """Feed one chunk of some prompts to the target, and then, with its features, to the proposer.

    A prompt may begin at any chunk whose predecessors are in its pages. Calls of one shape, the last one padded, then
    give the same numbers to the bit, wherever the prompt began.

    The logits are used only for the log-probabilities of the prompt; without a buffer for them nothing reads them.
    A target with `commit` does not get the last token of a prompt, so the features of that token mean nothing there.

    Args:
        model: the target.
        proposer: the proposer.
        inputs: the chunk, [R, T], with `num_tokens`.
        following: [R, T] int32, the token after each, -1 where it is not known.
        previous: features of the token before the chunk, [R, ...], as the call before returned them; None at the start
            of the prompts.
        fed: the state after the calls before. Its `log_probs` is a buffer with the rows of the batch, which gets the
            log-probability of prompt token i under the model in slot i, for i >= 1; or None.

    Returns:
        The state, and the features of the last token of each row [R, ...]. Padding of a chunk is in slots that are
        overwritten before any token sees them.
    """
    cache, proposer_state, last, logits = run_chunk(
        model, proposer, inputs, following, previous, fed.cache, fed.proposer
    )
    log_probs = fed.log_probs
    if log_probs is not None:
        log_probs = record(
            log_probs,
            inputs.positions + 1,
            following,
            logits,
            inputs.rows,
            axis_name=model.axis_name,
        )
    return Fed(cache, proposer_state, log_probs), last


def run_chunk(
    model: Model,
    proposer: Proposer,
    inputs: ModelInput,
    following: Array,
    previous: PyTree,
    cache: Memory,
    proposer_state: Memory,
) -> tuple[Memory, Memory, PyTree, Array]:
    """Feed a chunk as `feed_chunk` does, or a packed call, whose pieces are chunks, as rows are elsewhere.

    Returns:
        Both memories, the features of the last token of each row or piece, and the logits [R, T, V].
    """
    output, cache = run(model, inputs if model.commit is None else without_pending(inputs, following), cache)
    of_call = inputs, following, previous, output.features
    return cache, *feed_proposer(proposer, *of_call, proposer_state), output.logits


def feed_proposer(
    proposer: Proposer, inputs: ModelInput, following: Array, previous: PyTree, features: PyTree, state: Memory
) -> tuple[Memory, PyTree]:
    """Feed a chunk to the proposer, given the target's features of it [R, T, ...]; see `feed_chunk`.

    Returns:
        The proposer's memory, and the features of the last token of each row or piece.
    """
    if previous is None:
        num_sequences = inputs.counts.shape[0]
        previous = jax.tree.map(lambda x: jnp.zeros((num_sequences, *x.shape[2:]), x.dtype), features)
    state = in_memory(proposer).prefill(inputs, following, previous, features, state)
    counts = inputs.counts
    index = jnp.maximum(counts - 1, 0)

    def last(features: Array, previous: Array) -> Array:
        fed = at_token(inputs, features, index)
        has_any = (counts > 0).reshape(-1, *[1] * (fed.ndim - 1))
        return jnp.where(has_any, fed, previous)

    return state, jax.tree.map(last, features, previous)


def without_pending(inputs: ModelInput, following: Array) -> ModelInput:
    """Return a chunk of prompts in which the last token of a prompt counts as padding.

    The first step feeds that token, and a recurrent state must take it once.

    Args:
        inputs: the chunk, [R, T].
        following: [R, T] int32, the token after each; -1 after the last token of a prompt.
    """
    is_kept = (jnp.arange(following.shape[1], dtype=jnp.int32)[None] < inputs.counts[:, None]) & (following >= 0)
    return inputs._replace(num_tokens=jnp.sum(is_kept, axis=1, dtype=jnp.int32))


def feed(
    model: Model,
    proposer: Proposer,
    prompts: Context,
    cache: Memory,
    proposer_state: Memory,
    *,
    rows: Array | None = None,
    chunk_size: int | None = None,
    log_probs: LogProbs | None = None,
) -> Fed:
    """Feed prompts to the target and to a proposer, in calls of one static size.

    Where both take pages, a call holds some of the rows, and rows of similar length share their calls: short prompts do
    not pay for long ones. Elsewhere a call holds all rows, and so it does where they may lie on several devices.

    Args:
        model: the target.
        proposer: the proposer.
        prompts: `tokens` [N, W] are the right-padded prompts, `length` [N] their lengths and `pages` their pages.
        cache: the target's memory.
        proposer_state: the proposer's memory.
        rows: [N] int32, the row of the memories that each prompt is fed to; None feeds the rows in order.
        chunk_size: the most tokens of a prompt in a call; None is 256, and up to 8192 for a few rows on a GPU, or 2048
            with `log_probs`.
        log_probs: a buffer with the rows of the memories, as `feed_chunk` has it.

    Returns:
        The states of target and proposer, and the buffer.
    """
    num_prompts, width = prompts.tokens.shape
    is_known = isinstance(num_prompts, int)  # and not symbolic, as in exported functions
    if chunk_size is None:
        chunk_size = CHUNK
        if has_static_shape(prompts.tokens) and jax.default_backend() != "cpu":
            most = LONG if log_probs is None else BUDGET
            chunk_size = _even_size(width, max(CHUNK, most // max(1, num_prompts)))
    size = min(chunk_size, width)
    tokens = jnp.where(jnp.arange(width, dtype=jnp.int32)[None] < prompts.length[:, None], prompts.tokens, -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1 + -width % size)), constant_values=-1)
    fed = Fed(cache, proposer_state, log_probs)

    takes_pages = model.takes_pages and in_memory(proposer).takes_pages
    in_groups = takes_pages and is_known and not is_partitioned((prompts, fed))
    num_groups = -(-num_prompts // max(1, BUDGET // size)) if in_groups else 1
    if num_groups <= 1:
        return _feed_group(model, proposer, size, _Group(tokens, prompts.length, prompts.pages, rows), fed)

    group_size = -(-num_prompts // num_groups)
    order = jnp.argsort(prompts.length, descending=True).astype(jnp.int32)
    order = jnp.pad(order, (0, num_groups * group_size - num_prompts), constant_values=num_prompts)
    rows = jnp.arange(num_prompts, dtype=jnp.int32) if rows is None else rows

    def body(index: Array | int, fed: Fed) -> Fed:
        own = jax.lax.dynamic_slice_in_dim(order, index * group_size, group_size)
        of_own = rows.at[own].get(mode="fill", fill_value=NO_PAGE)  # which no batch has as a row, either
        pages = of_own[:, None]  # of a dense cache, where row b owns page b
        if prompts.pages is not None:
            pages = prompts.pages.at[own].get(mode="fill", fill_value=NO_PAGE)
        length = prompts.length.at[own].get(mode="fill", fill_value=0)
        group = _Group(tokens.at[own].get(mode="fill", fill_value=-1), length, pages, of_own)
        return _feed_group(model, proposer, size, group, fed)

    return jax.lax.fori_loop(0, num_groups, body, as_carry(partial(body, 0), fed, prompts))


def _even_size(width: int, most: int) -> int:
    """Return the tokens of a call where all calls of a prompt have as many: a multiple of 64 up to `most`."""
    num_calls = -(-width // (most // 64 * 64))
    return -(-width // (64 * num_calls)) * 64


@dataclass(frozen=True)
class _Group:
    """The prompts that share their calls."""

    tokens: Array  # [R, W] int32, then -1; W is a multiple of the chunk size, plus 1
    length: Array  # [R] int32
    pages: Array | None  # [R, P] int32
    rows: Array | None  # [R] int32, as in ModelInput


def _feed_group(model: Model, proposer: Proposer, size: int, group: _Group, fed: Fed) -> Fed:
    """Feed the chunks of some prompts, as many as the longest of them has."""

    def feed_at(index: Array | int, fed: Fed, previous: PyTree) -> tuple[Fed, PyTree]:
        start = index * size
        tokens, following = (jax.lax.dynamic_slice_in_dim(group.tokens, start + i, size, axis=1) for i in range(2))
        inputs = ModelInput(
            jnp.maximum(tokens, 0),
            jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), tokens.shape),
            pages=group.pages,
            num_tokens=jnp.clip(group.length - start, 0, size),
            rows=group.rows,
        )
        return feed_chunk(model, proposer, inputs, following, previous, fed)

    if group.tokens.shape[1] == size + 1:
        return feed_at(0, fed, None)[0]
    last = jax.eval_shape(lambda fed: feed_at(0, fed, None)[1], fed)
    previous = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), last)
    num_chunks = (jnp.max(group.length, initial=0) + size - 1) // size

    def body(index: Array | int, carry: tuple[Fed, PyTree]) -> tuple[Fed, PyTree]:
        return feed_at(index, *carry)

    carry = as_carry(partial(body, 0), (fed, previous), group.tokens, group.length)
    return jax.lax.fori_loop(0, num_chunks, body, carry)[0]
