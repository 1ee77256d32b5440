"""Rows of a state that requests enter and leave: pure functions on a state, and requests as rows of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, metrics, proposers
from specjax.decoding.drafters import check_pair, in_memory
from specjax.engine.grammars import GrammarTables
from specjax.pages import Pages, check_pages
from specjax.parallel import OnMesh
from specjax.sampling import Sampling
from specjax.sampling.capacities import Capacities, neutral, neutral_like, placed
from specjax.sampling.guided.tables import Guide
from specjax.types import NO_PAGE, Array, Context, Memory, Model, Proposer, PyTree
from specjax.validation import is_integer


class Row(NamedTuple):
    """A request as its slot holds it. In `insert` the arrays lack the axis of the batch, and may be the host's."""

    context: Context  # without pages
    sampling: Sampling
    key_data: Array  # [B, 2] uint32, the data of the request's key
    totals: metrics.Totals
    sample: Array | None = None  # [B] uint32, the number of the sample among the request's samples; None in a state


def empty(
    model: Model,
    proposer: Proposer | None,
    *,
    num_slots: int,
    max_length: int,
    capacities: Capacities | None = None,
    pool: tuple[int, int] | None = None,
) -> decode.State:
    """Return a state in which every slot is vacant.

    Args:
        model: the target.
        proposer: the proposer; None is plain decoding.
        num_slots: B, the number of slots.
        max_length: L, the size of the token buffer of each slot, which holds prompt and output.
        capacities: the sizes of the sampling parameters; None is `Capacities()`.
        pool: the number of pages and the page size of the pools that the caches of target and proposer are. None makes
            dense caches.

    Raises:
        ValueError: a number is out of its range, or the model or the proposer takes no pages.
    """
    proposer = in_memory(proposer or proposers.none())
    numbers = [("num_slots", num_slots, 1), ("max_length", max_length, 2)]
    if pool is not None:
        numbers += [("num_pages", pool[0], 1), ("page_size", pool[1], 1)]
    for name, number, least in numbers:
        if not (is_integer(number) and number >= least):
            raise ValueError(f"{name} must be an integer >= {least}, got {number!r}")
    if model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the model's {model.max_length}, got {max_length}")
    check_pair(model, proposer)
    capacities = capacities or Capacities()
    if isinstance(model.apply, OnMesh):
        model.apply.check_batch(num_slots)
    if capacities.logprobs > model.vocab_size:
        raise ValueError(f"logprobs must be at most V = {model.vocab_size}, got {capacities.logprobs}")
    table = None
    if pool is not None:
        num_pages, page_size = pool
        table = jnp.full((num_slots, -(-max_length // page_size)), NO_PAGE, jnp.int32)
        check_pages(model, proposer, Pages(jnp.zeros_like(table), num_pages, page_size), num_slots, max_length)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_slots, *x.shape)), neutral(capacities))
    if rows.guide is not None:
        tables = GrammarTables(capacities, model.vocab_size)
        guide = rows.guide._replace(
            token_classes=jnp.asarray(tables.token_classes), transitions=jnp.asarray(tables.transitions)
        )
        rows = rows._replace(guide=guide)
    zeros = jnp.zeros(num_slots, jnp.int32)
    num_pages, page_size = (num_slots, max_length) if pool is None else pool
    state = decode.State(
        context=Context(
            tokens=jnp.zeros((num_slots, max_length), jnp.int32),
            length=zeros,
            active=zeros > 0,
            prompt_length=zeros,
            guided_state=None if rows.guide is None else zeros,
            pages=table,
        ),
        cache=model.init_memory(num_slots, num_pages, page_size),
        proposer=proposer.init_memory(num_slots, num_pages, page_size),
        sampling=rows,
        keys=jax.random.wrap_key_data(jnp.zeros((num_slots, 2), jnp.uint32), impl="threefry2x32"),
        finished=zeros,
        totals=metrics.zeros(num_slots, proposer.num_draft_tokens),
    )
    return _with_rows(state, _vacant(_rows(state)))


def _rows(state: decode.State) -> Row:
    """Return the part of a state with a row for each request."""
    context, sampling = state.context._replace(pages=None), state.sampling
    if sampling.guide is not None:
        sampling = sampling._replace(guide=sampling.guide._replace(token_classes=None, transitions=None))
    return Row(context, sampling, jax.random.key_data(state.keys), state.totals)


def _with_rows(state: decode.State, rows: Row) -> decode.State:
    sampling, tables = rows.sampling, state.sampling.guide
    if sampling.guide is not None and tables is not None:
        guide = sampling.guide._replace(token_classes=tables.token_classes, transitions=tables.transitions)
        sampling = sampling._replace(guide=guide)
    return state._replace(
        context=rows.context._replace(pages=state.context.pages),
        sampling=sampling,
        keys=jax.random.wrap_key_data(rows.key_data, impl="threefry2x32"),
        totals=rows.totals,
    )


def _vacant(rows: Row) -> Row:
    """Return as many rows of vacant slots."""
    zeros = jax.tree.map(jnp.zeros_like, rows)
    buffer_size = rows.context.tokens.shape[1]
    length, prompt_length = (jnp.full_like(rows.context.length, buffer_size) for _ in range(2))
    context = zeros.context._replace(length=length, prompt_length=prompt_length)
    return zeros._replace(context=context, sampling=neutral_like(rows.sampling))


def insert(state: decode.State, slot: Array, row: Row) -> decode.State:
    """Make a vacant slot, whose cache holds the tokens of a request, an active row.

    Args:
        state: the state.
        slot: [] int32 in [0, B).
        row: the request, as `request` returns it.
    """
    key = jax.random.wrap_key_data(jnp.asarray(row.key_data), impl="threefry2x32")
    if row.sample is not None:
        key = keys.samples(key, row.sample)
    row = row._replace(key_data=jax.random.key_data(key), sample=None)
    rows = jax.tree.map(lambda all_rows, one: all_rows.at[slot].set(one), _rows(state), row)
    return _with_rows(state, rows)._replace(finished=state.finished.at[slot].set(decode.RUNNING))


def evict(state: decode.State, rows: Array) -> decode.State:
    """Make the slots that are true in `rows` [B] bool vacant; they have no pages then."""

    def choose(vacant: Array, x: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), vacant, x)

    kept = _rows(state)
    finished, table = state.finished, state.context.pages
    state = _with_rows(state, jax.tree.map(choose, _vacant(kept), kept))
    return state._replace(
        context=state.context._replace(pages=None if table is None else choose(jnp.full_like(table, NO_PAGE), table)),
        finished=jnp.where(rows, decode.RUNNING, finished),
    )


def kept_of(state: decode.State, slot: Array) -> tuple[PyTree, PyTree]:
    """Return what target and proposer keep of a slot beside its pages, leaves without the axis of the batch.

    After a chunk of a prompt, this and the pages are all that another slot needs to go on with the prompt.
    """
    return jax.tree.map(lambda leaf: leaf[slot], (state.cache.rows, state.proposer.rows))


def with_kept(state: decode.State, slot: Array, kept: tuple[PyTree, PyTree]) -> decode.State:
    """Return the state in which target and proposer keep of a vacant slot what `kept_of` has returned of another."""
    held = state.cache.rows, state.proposer.rows
    cache, proposer = jax.tree.map(lambda leaf, one: leaf.at[slot].set(one), held, kept)
    return state._replace(cache=Memory(state.cache.pools, cache), proposer=Memory(state.proposer.pools, proposer))


def with_pages(state: decode.State, table: Array) -> decode.State:
    """Replace the page table [B, P] int32. Rows get pages before a chunk or a step writes to them."""
    return state._replace(context=state.context._replace(pages=table))


def with_grammars(state: decode.State, token_classes: Array, transitions: Array) -> decode.State:
    """Replace the tables of grammars, arrays as `GrammarTables` has them. The places of rows that go on must stay."""
    guide = state.sampling.guide
    assert guide is not None, "the capacities have grammars"
    guide = guide._replace(token_classes=token_classes, transitions=transitions)
    return state._replace(sampling=state.sampling._replace(guide=guide))


def request(
    state: decode.State,
    tokens: np.ndarray,
    key_data: np.ndarray,
    sampling: Sampling,
    *,
    prompt_length: int | None = None,
    sample: int = 0,
    totals: metrics.Totals | None = None,
    guide: Guide | None = None,
) -> Row:
    """Return a request as `insert` takes it, in host arrays.

    A request that goes on, in another slot or later, has its tokens so far, and goes on as if it had never stopped:
    noise comes from its key and the position of a token, and penalties count its tokens.

    Args:
        state: a state of the sizes that the request is for.
        tokens: [length] int32, the prompt and the tokens generated so far.
        key_data: [2] uint32, the data of the key of the request.
        sampling: the parameters of the request, as `capacities.of_request` returns them.
        prompt_length: number of tokens that are the prompt; None is all.
        sample: the number of the sample among the request's samples, which differ in their noise.
        totals: the counts so far, arrays without the axis of the batch; None is zeros.
        guide: the place of the request's grammar and its state after the generated tokens, as `GrammarTables.guide`
            returns them; None for a request without a grammar.

    Raises:
        ValueError: the tokens are not int32 [length] with length in [1, L - 1], a number is out of its range, or a
            grammar has no place.
    """
    max_length = state.context.tokens.shape[1]
    if tokens.ndim != 1 or tokens.dtype != np.int32 or not 1 <= len(tokens) < max_length:
        raise ValueError(
            f"tokens must be int32 [length] with length in [1, max_length - 1 = {max_length - 1}], "
            f"got {tokens.dtype} {list(tokens.shape)}"
        )
    length = len(tokens)
    prompt_length = length if prompt_length is None else prompt_length
    left = int(sampling.max_tokens) - (length - prompt_length)
    if not 1 <= prompt_length <= length or left < 1:
        raise ValueError(
            f"prompt_length must be in [1, length = {length}] and leave fewer than max_tokens = "
            f"{int(sampling.max_tokens)} tokens after it, got {prompt_length}"
        )
    if np.shape(key_data) != (2,) or np.asarray(key_data).dtype != np.uint32:
        raise ValueError(f"key_data must be uint32 [2], got {np.asarray(key_data).dtype} {np.shape(key_data)}")
    buffer = np.zeros(max_length, np.int32)
    buffer[:length] = tokens
    if totals is None:
        totals = metrics.Totals(*(of_host(np.zeros(x.shape[1:], x.dtype)) for x in state.totals))
    sampling = placed(sampling, guide)
    return Row(
        context=Context(
            tokens=of_host(buffer),
            length=of_host(np.int32(length)),
            active=of_host(np.bool(True)),
            prompt_length=of_host(np.int32(prompt_length)),
            guided_state=None if sampling.guide is None else of_host(np.int32(sampling.guide.initial)),
        ),
        sampling=sampling,
        key_data=of_host(key_data),
        totals=totals,
        sample=of_host(np.uint32(sample)),
    )


def of_host(array: Any) -> Any:
    """Return an array of the host as it is, for the field of a record, whose type is an array of a device."""
    return array
