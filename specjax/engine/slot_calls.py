"""The calls that compute: a packed call with chunks of prompts, a step of the active rows, and both at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, metrics, proposers, scorers, verifiers
from specjax.decoding.drafters import in_memory
from specjax.decoding.log_probs import LogProbs, logprobs
from specjax.engine.slot_rows import of_host
from specjax.operations.pieces import by_tile, in_tiles
from specjax.parallel import WHOLE, OnMesh, on_devices
from specjax.prompts import feed_proposer, run_chunk
from specjax.sampling.capacities import Needs, keep_only
from specjax.types import NO_PAGE, Array, Memory, Model, ModelInput, Proposer, PyTree, Scorer, Verifier


class Chunk(NamedTuple):
    """Some tokens of a prompt, or a packed call with some tokens of each of S prompts, in host arrays."""

    inputs: ModelInput  # tokens and positions [1, T] int32; of a prompt num_tokens [1], of a packed call pieces [S, 3]
    following: Any  # [1, T] int32, the token after each, -1 where it is not known
    previous: PyTree  # features of the token before the chunk, [1, ...]; of a packed call a tuple of S such trees


def chunk_at(tokens: np.ndarray, start: int, size: int, previous: PyTree, count: int | None = None) -> Chunk:
    """Return the chunk of `size` tokens that begins at `start` in tokens [length] int32, padded at their end.

    It has `count` of the tokens, and padding after them; None is as many as there are.
    """
    count = size if count is None else count
    part, following = (np.full((1, size), fill, np.int32) for fill in (0, -1))
    fed, later = tokens[start : start + count], tokens[start + 1 : start + 1 + count]
    part[0, : len(fed)], following[0, : len(later)] = fed, later
    inputs = ModelInput(
        tokens=of_host(part),
        positions=of_host(np.arange(start, start + size, dtype=np.int32)[None]),
        num_tokens=of_host(np.array([len(fed)], np.int32)),
    )
    return Chunk(inputs, following, previous)


def packed(
    slots: Sequence[int], chunks: Sequence[Chunk], num_tiles: int, size: int, *, no_slot: int, no_features: PyTree
) -> Chunk:
    """Return chunks of some slots as one packed call, for `prefill_chunk`.

    Args:
        slots: the slots, each once.
        chunks: the chunk of each, of a multiple of `size` tokens.
        num_tiles: S, the tiles of the call.
        size: tokens of a tile.
        no_slot: B, which stands for no slot.
        no_features: features for places without a chunk.
    """
    tokens, positions = np.zeros((2, 1, num_tiles * size), np.int32)
    following = np.full_like(tokens, -1)
    pieces = np.tile(np.array([no_slot, 0, 0], np.int32), (num_tiles, 1))
    previous, begin = [no_features] * num_tiles, 0
    for i, (slot, chunk) in enumerate(zip(slots, chunks, strict=True)):
        end = begin + chunk.following.shape[1]
        tokens[:, begin:end], positions[:, begin:end] = chunk.inputs.tokens, chunk.inputs.positions
        following[:, begin:end], previous[i] = chunk.following, chunk.previous
        pieces[i] = slot, begin, chunk.inputs.counts[0]
        begin = end
    inputs = ModelInput(of_host(tokens), of_host(positions), pieces=of_host(pieces))
    return Chunk(inputs, following, tuple(previous))


class Output(NamedTuple):
    """Output of a step for the host, for its R rows: all B slots, or the given slots in their order."""

    tokens: Array  # [R, K+1] int32, the committed tokens, then -1
    length: Array  # [R] int32, number of tokens of the row with these; L in a vacant slot
    finished: Array  # [R] int32, decode.RUNNING or the reason why the row has ended
    num_drafts: Array  # [R] int32, number of draft tokens of the row
    num_accepted: Array  # [R] int32, number of accepted ones; 0 in rows that were not active
    totals: metrics.Totals  # the counts of each row so far
    log_probs: LogProbs | None  # of the committed tokens, fields [R, K+1, ...]; None if not asked for
    # [R, K+4] int32: tokens, finished, num_drafts and num_accepted of each row, in one array that is quick to read
    numbers: Array


def prefill_chunk(
    model: Model,
    proposer: Proposer | None,
    state: decode.State,
    chunk: Chunk,
    *,
    num_logprobs: int | None = None,
) -> tuple[decode.State, tuple[PyTree, ...], LogProbs | None]:
    """Feed one chunk of a prompt to each of some vacant slots, whose pages are in the table of the state.

    Where target or proposer take no packed calls, or the call has one tile, a chunk fills one tile at most, and each
    tile is a row of a call.

    Args:
        model: the target.
        proposer: the proposer that the state was made with; None is plain decoding.
        state: the state.
        chunk: the chunks, as `packed` returns them. `previous` has the features that the call before returned, and
            zeros (`no_features`) at the start of a prompt.
        num_logprobs: how many of the most likely tokens to list beside the one that follows each token of the chunks,
            static; None reports no log-probabilities.

    Returns:
        The state, a tuple with the features of the last token of each chunk, [1, ...], and the log-probabilities of
        the tokens that follow by the model's logits, fields [1, C, ...].
    """
    proposer = proposer or proposers.none()
    chunk = chunk._replace(previous=jax.tree.map(lambda *rows: jnp.concatenate(rows), *chunk.previous))
    if isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None:
        cache, proposer_state, last, entries = _run_chunk_on_mesh(model, proposer, state, chunk, num_logprobs)
    else:
        cache, proposer_state, last, logits = _run_chunk(
            model,
            proposer,
            chunk,
            table=state.context.pages,
            cache=state.cache,
            proposer_state=state.proposer,
        )
        entries = None if num_logprobs is None else logprobs(logits, chunk.following, num_logprobs)
    return state._replace(cache=cache, proposer=proposer_state), _of_pieces(chunk, last), entries


def _of_pieces(chunk: Chunk, last: PyTree) -> tuple[PyTree, ...]:
    """Return the features [1, ...] of each piece of a packed call, given all of them."""
    num_pieces = chunk.inputs.counts.shape[0]
    return tuple(jax.tree.map(lambda x, row=row: x[row : row + 1], last) for row in range(num_pieces))


def _run_chunk(
    model: Model,
    proposer: Proposer,
    chunk: Chunk,
    *,
    table: Array | None,
    cache: Memory,
    proposer_state: Memory,
) -> tuple[Memory, Memory, PyTree, Array]:
    """Run a packed call; see `run_chunk`. The logits are [1, C, V]."""
    inputs, following = _with_pages(chunk.inputs, table), chunk.following
    if not takes_packed(model, proposer) or inputs.counts.shape[0] == 1:
        inputs = by_tile(inputs)
        following = in_tiles(inputs, following)
    of_call = inputs, following, chunk.previous
    cache, proposer_state, last, logits = run_chunk(model, proposer, *of_call, cache, proposer_state)
    return cache, proposer_state, last, logits.reshape(1, -1, logits.shape[-1])


def _with_pages(inputs: ModelInput, table: Array | None) -> ModelInput:
    """Return a packed call with the pages of its slots."""
    slots = inputs.sequences
    assert slots is not None, "a packed call has pieces"
    return inputs._replace(
        pages=slots[:, None] if table is None else table.at[slots].get(mode="fill", fill_value=NO_PAGE)
    )


def takes_packed(model: Model, proposer: Proposer) -> bool:
    """Return whether target and proposer take packed calls, in which a chunk may fill several tiles."""
    proposer = in_memory(proposer)
    takes_pages = model.takes_pages and proposer.takes_pages
    return takes_pages and model.takes_groups and getattr(proposer, "takes_groups", False)


def _run_chunk_on_mesh(
    model: Model, proposer: Proposer, state: decode.State, chunk: Chunk, num_logprobs: int | None
) -> tuple[Memory, Memory, PyTree, LogProbs | None]:
    """Run chunks on devices that share the rows: all run them, and each keeps the chunks of its slots."""
    shared = model.apply
    size = state.context.length.shape[0] // shared.num_row_groups  # rows of a device

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, proposer_state, chunk = operands
        slots, start, count = jnp.unstack(chunk.inputs.pieces, axis=1)
        local = slots - jax.lax.axis_index(shared.batch_axis) * size
        is_local = (local >= 0) & (local < size)
        local = jnp.where(is_local, local, size)  # out of range, which is read as zeros and not written
        inputs = chunk.inputs._replace(pieces=jnp.stack([local, start, count], axis=1))
        cache, proposer_state, last, logits = _run_chunk(
            model,
            proposer,
            chunk._replace(inputs=inputs),
            table=None,
            cache=cache,
            proposer_state=proposer_state,
        )
        entries = None
        if num_logprobs is not None:
            entries = logprobs(logits, chunk.following, num_logprobs, axis_name=model.axis_name)

        def of_owner(x: Array, is_own: Array) -> Array:
            is_own = jnp.expand_dims(is_own, tuple(range(is_own.ndim, x.ndim)))
            return jax.lax.psum(jnp.where(is_own, x, 0), shared.batch_axis)

        rows = by_tile(inputs).rows
        assert rows is not None, "each tile has a row"
        is_own_token = jnp.repeat(rows < size, inputs.tokens.shape[1] // rows.shape[0])[None]
        last = jax.tree.map(lambda x: of_owner(x, is_local), last)
        entries = jax.tree.map(lambda x: of_owner(x, is_own_token), entries)
        return cache, (proposer_state, last, entries)

    cache, (proposer_state, last, entries) = on_devices(
        model,
        one_device,
        state.cache,
        operands=(proposer, state.proposer, chunk),
        specs=(WHOLE, shared.of_rows, WHOLE),
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
        state: the state. Each active row has pages for the tokens that the step feeds.
        rows: [R] int32, all active rows and any others, no row twice; B is none. None computes all B rows.
        verifier: a verifier of `specjax.verifiers` or your own.
        scorer: a scorer of `specjax.scorers` or your own.
        use: which sampling features the step computes, static: the largest `capacities.needs_of` of the active rows.
            Any larger number gives the same tokens.
        num_logprobs: how many of the most likely tokens to list beside each committed one, static; None reports no
            log-probabilities.
    """
    options: Any = {"verifier": verifier, "scorer": scorer, "num_logprobs": num_logprobs}
    state, output, _ = _step(model, proposer, state, rows, use, **options)
    return state, output


def mixed_step(
    model: Model,
    proposer: Proposer | None,
    state: decode.State,
    chunk: Chunk,
    rows: Array | None = None,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    use: int = Needs.EVERYTHING,
) -> tuple[decode.State, Output, tuple[PyTree, ...]]:
    """Take a step as `step` does, and feed chunks as `prefill_chunk` does.

    The target reads its weights once for both. Where target or proposer take no packed calls, or the scorer is another
    one than `scorers.mqa`, the calls follow each other.

    Args:
        model, proposer, state, rows, verifier, scorer, use: as `step` takes them.
        chunk: as `prefill_chunk` takes it, for slots that are vacant.

    Returns:
        The state, the output of the step, and the features of the last token of each chunk, as `prefill_chunk` returns
        them.
    """
    proposer = proposer or proposers.none()
    options: Any = {"verifier": verifier, "scorer": scorer}
    if not takes_packed(model, proposer) or getattr(scorer, "func", scorer) is not scorers.mqa:
        state, output = step(model, proposer, state, rows, use=use, **options)
        state, features, _ = prefill_chunk(model, proposer, state, chunk)
        return state, output, features
    inputs = _with_pages(chunk.inputs, state.context.pages)
    previous = jax.tree.map(lambda *rows: jnp.concatenate(rows), *chunk.previous)
    state, output, of_prompts = _step(model, proposer, state, rows, use, **options, prompts=inputs)
    memory, last = feed_proposer(proposer, inputs, chunk.following, previous, of_prompts, state.proposer)
    return state._replace(proposer=memory), output, _of_pieces(chunk, last)


def _step(
    model: Model, proposer: Proposer | None, state: decode.State, rows: Array | None, use: int, **options: Any
) -> tuple[decode.State, Output, PyTree]:
    """Take a step, given options of `decode.step`; return also the features of the prompts beside it."""
    sampling, active = state.sampling, state.context.active
    computed = state._replace(sampling=keep_only(sampling, use))
    state, info = decode.step(model, proposer, computed, rows=rows, **options)
    length, finished, totals = state.context.length, state.finished, state.totals
    if rows is not None:
        is_row = rows < active.shape[0]
        active, length, finished, totals = jax.tree.map(
            lambda x: x.at[rows].get(mode="clip"), (active, length, finished, totals)
        )
        active &= is_row
    num_accepted = jnp.where(active, jnp.minimum(info.num_accepted, info.num_drafts), 0)
    columns = (x.astype(jnp.int32)[:, None] for x in (finished, info.num_drafts, num_accepted))
    output = Output(
        tokens=info.tokens,
        length=length,
        finished=finished,
        num_drafts=info.num_drafts,
        num_accepted=num_accepted,
        totals=totals,
        log_probs=info.log_probs,
        numbers=jnp.concatenate([info.tokens, *columns], axis=1),
    )
    return state._replace(sampling=sampling), output, info.features
