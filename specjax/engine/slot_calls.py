"""The two calls that compute: a chunk of each of some prompts, and a step of the active rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, metrics, proposers, scorers, verifiers
from specjax.decoding.log_probs import LogProbs, logprobs
from specjax.engine.slot_rows import of_host
from specjax.parallel import WHOLE, OnMesh, on_devices
from specjax.prompts import run_chunk
from specjax.sampling.capacities import Needs, keep_only
from specjax.types import NO_PAGE, Array, Memory, Model, ModelInput, Proposer, PyTree, Scorer, Verifier


class Chunk(NamedTuple):
    """Some tokens of each of R prompts, in host arrays."""

    inputs: ModelInput  # tokens and positions [R, T] int32, num_tokens [R] int32
    following: Any  # [R, T] int32, the token after each, -1 where it is not known
    previous: PyTree  # features of the token before the chunk, [R, ...]


def chunk_at(tokens: np.ndarray, start: int, size: int, previous: PyTree) -> Chunk:
    """Return the chunk of `size` tokens that begins at `start` in tokens [length] int32, padded at their end."""
    part, following = (np.full((1, size), fill, np.int32) for fill in (0, -1))
    fed, later = tokens[start : start + size], tokens[start + 1 : start + 1 + size]
    part[0, : len(fed)], following[0, : len(later)] = fed, later
    inputs = ModelInput(
        tokens=of_host(part),
        positions=of_host(np.arange(start, start + size, dtype=np.int32)[None]),
        num_tokens=of_host(np.array([len(fed)], np.int32)),
    )
    return Chunk(inputs, following, previous)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return chunks of one row as the rows of one, for `prefill_chunk`."""
    inputs = jax.tree.map(lambda *rows: np.concatenate(rows), *[chunk.inputs for chunk in chunks])
    following = np.concatenate([chunk.following for chunk in chunks])
    return Chunk(inputs, following, previous=tuple(chunk.previous for chunk in chunks))


class Output(NamedTuple):
    """Output of a step for the host, for its R rows: all B slots, or the given slots in their order."""

    tokens: Array  # [R, K+1] int32, the committed tokens, then -1
    length: Array  # [R] int32, number of tokens of the row with these; L in a vacant slot
    finished: Array  # [R] int32, decode.RUNNING or the reason why the row has ended
    num_drafts: Array  # [R] int32, number of draft tokens of the row
    num_accepted: Array  # [R] int32, number of accepted ones; 0 in rows that were not active
    totals: metrics.Totals  # the counts of each row so far
    log_probs: LogProbs | None  # of the committed tokens, fields [R, K+1, ...]; None if not asked for


def prefill_chunk(
    model: Model,
    proposer: Proposer | None,
    state: decode.State,
    slots: Array,
    chunk: Chunk,
    *,
    num_logprobs: int | None = None,
) -> tuple[decode.State, tuple[PyTree, ...], LogProbs | None]:
    """Feed one chunk of a prompt to each of some vacant slots, whose pages are in the table of the state.

    Args:
        model: the target.
        proposer: the proposer that the state was made with; None is plain decoding.
        state: the state.
        slots: [R] int32 in [0, B], no slot twice. B stands for none: of such a row nothing is kept.
        chunk: the chunks, [R, T], as `joined` returns them. `previous` is a tuple with the features of each row, [1,
            ...]: those that the call before returned, and zeros (`no_features`) at the start of the prompt.
        num_logprobs: how many of the most likely tokens to list beside the one that follows each token of the chunks,
            static; None reports no log-probabilities.

    Returns:
        The state, a tuple with the features of the last token of each chunk, [1, ...], and the log-probabilities of
        the tokens that follow by the model's logits, fields [R, T, ...].
    """
    proposer = proposer or proposers.none()
    chunk = chunk._replace(previous=jax.tree.map(lambda *rows: jnp.concatenate(rows), *chunk.previous))
    if isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None:
        cache, proposer_state, last, entries = _run_chunk_on_mesh(model, proposer, state, slots, chunk, num_logprobs)
    else:
        cache, proposer_state, last, logits = _run_chunk(
            model,
            proposer,
            chunk,
            table=state.context.pages,
            slots=slots,
            cache=state.cache,
            proposer_state=state.proposer,
        )
        entries = None if num_logprobs is None else logprobs(logits, chunk.following, num_logprobs)
    features = tuple(jax.tree.map(lambda x, row=row: x[row : row + 1], last) for row in range(slots.shape[0]))
    return state._replace(cache=cache, proposer=proposer_state), features, entries


def _run_chunk(
    model: Model,
    proposer: Proposer,
    chunk: Chunk,
    *,
    table: Array | None,
    slots: Array,
    cache: Memory,
    proposer_state: Memory,
) -> tuple[Memory, Memory, PyTree, Array]:
    """Run chunks [R, T] in some slots; see `run_chunk`."""
    pages = slots[:, None] if table is None else table.at[slots].get(mode="fill", fill_value=NO_PAGE)
    inputs = chunk.inputs._replace(pages=pages, rows=slots)
    return run_chunk(model, proposer, inputs, chunk.following, chunk.previous, cache, proposer_state)


def _run_chunk_on_mesh(
    model: Model, proposer: Proposer, state: decode.State, slots: Array, chunk: Chunk, num_logprobs: int | None
) -> tuple[Memory, Memory, PyTree, LogProbs | None]:
    """Run chunks on devices that share the rows: all run them, and each keeps the chunks of its slots."""
    shared = model.apply
    size = state.context.length.shape[0] // shared.num_row_groups  # rows of a device

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, proposer_state, slots, chunk = operands
        local = slots - jax.lax.axis_index(shared.batch_axis) * size
        is_local = (local >= 0) & (local < size)
        cache, proposer_state, last, logits = _run_chunk(
            model,
            proposer,
            chunk,
            table=None,
            slots=jnp.where(is_local, local, size),  # out of range, which is read as zeros and not written
            cache=cache,
            proposer_state=proposer_state,
        )
        entries = None
        if num_logprobs is not None:
            entries = logprobs(logits, chunk.following, num_logprobs, axis_name=model.axis_name)

        def of_owner(x: Array) -> Array:
            return jax.lax.psum(jnp.where(is_local.reshape(-1, *[1] * (x.ndim - 1)), x, 0), shared.batch_axis)

        return cache, (proposer_state, *jax.tree.map(of_owner, (last, entries)))

    cache, (proposer_state, last, entries) = on_devices(
        model,
        one_device,
        state.cache,
        operands=(proposer, state.proposer, slots, chunk),
        specs=(WHOLE, shared.of_rows, WHOLE, WHOLE),
        out=(shared.of_rows, WHOLE, WHOLE),
    )
    return cache, proposer_state, last, entries


def step(
    model: Model,
    proposer: Proposer | None,
    state: decode.State,
    rows: Array | None = None,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    use: int = Needs.EVERYTHING,
    num_logprobs: int | None = None,
) -> tuple[decode.State, Output]:
    """Take one step of `decode.step` in all active rows.

    Args:
        model: the target.
        proposer: the proposer that the state was made with; None is plain decoding.
        state: the state. Each active row has pages for its next K + 1 tokens.
        rows: [R] int32, all active rows and any others, no row twice; B is none. None computes all B rows.
        verifier: a verifier of `specjax.verifiers` or your own.
        scorer: a scorer of `specjax.scorers` or your own.
        use: which sampling features the step computes, static: the largest `capacities.needs_of` of the active rows.
            Any larger number gives the same tokens.
        num_logprobs: how many of the most likely tokens to list beside each committed one, static; None reports no
            log-probabilities.
    """
    sampling, active = state.sampling, state.context.active
    state, info = decode.step(
        model,
        proposer,
        state._replace(sampling=keep_only(sampling, use)),
        rows=rows,
        verifier=verifier,
        scorer=scorer,
        num_logprobs=num_logprobs,
    )
    length, finished, totals = state.context.length, state.finished, state.totals
    if rows is not None:
        is_row = rows < active.shape[0]
        active, length, finished, totals = jax.tree.map(
            lambda x: x.at[rows].get(mode="clip"), (active, length, finished, totals)
        )
        active &= is_row
    output = Output(
        tokens=info.tokens,
        length=length,
        finished=finished,
        num_drafts=info.num_drafts,
        num_accepted=jnp.where(active, jnp.minimum(info.num_accepted, info.num_drafts), 0),
        totals=totals,
        log_probs=info.log_probs,
    )
    return state._replace(sampling=sampling), output
