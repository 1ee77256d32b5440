"""Rows of a batch that requests enter and leave, while its arrays, and so its compiled programs, stay the same.

The functions are pure. A state is a `decode.State` whose sampling parameters have fixed sizes. A *slot* is a row of it;
one without a request is *vacant*: its row is not active, and its length is L, the size of the token buffer.

A request enters in two parts: `prefill_chunk` feeds its tokens to the vacant slot chunk by chunk, between the steps of
the others, and then `insert` makes the row active. A call of it feeds one chunk each to as many slots as it has rows.
The steps in between do not disturb the chunks. In a pool of pages they write nothing for rows that are not active. In a
dense cache they write the last two slots of a vacant row, which a request needs only if it fills the buffer but for one
token, and then its first step writes them again. Other state of a proposer for a row may change in a step, so no step
comes between the last chunk and `insert`.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from specjax import decode, keys, metrics, proposers, scorers, verifiers
from specjax.decoding import state_rows
from specjax.decoding.binding import as_pytrees
from specjax.decoding.drafters import check_memory, in_memory
from specjax.decoding.log_probs import LogProbs, logprobs
from specjax.engine.draft_length import with_draft_lengths
from specjax.engine.grammars import GrammarTables
from specjax.engine.report import Programs, name_of_chunks, name_of_step
from specjax.pages import Pages, check_pages
from specjax.parallel import WHOLE, OnMesh, on_devices, put
from specjax.prompts import run_chunk
from specjax.sampling import Sampling
from specjax.sampling.capacities import CUT, EVERYTHING, GREEDY, Capacities, neutral, neutral_like, placed, restrict
from specjax.sampling.guided.tables import Guide
from specjax.types import NO_PAGE, Array, Context, Memory, Model, ModelInput, Proposer, PyTree, Scorer, Verifier
from specjax.validation import is_integer

COMPILED_AT_A_TIME = min(4, os.cpu_count() or 1)  # programs, while others are traced
NAMES_OF_USES: dict[int, str] = {GREEDY: "greedy", CUT: "temperatures and cuts", EVERYTHING: "all parameters"}


class Row(NamedTuple):
    """A request as its slot holds it. In `insert` the arrays lack the axis of the batch, and may be the host's."""

    context: Context  # without pages
    sampling: Sampling
    key_data: Array  # [B, 2] uint32, the data of the request's key
    totals: metrics.Totals
    sample: Array | None = None  # [B] uint32, the number of the sample among the request's samples; None in a state


class Chunk(NamedTuple):
    """Some tokens of each of R prompts, in host arrays."""

    inputs: ModelInput  # tokens and positions [R, T] int32, num_tokens [R] int32
    following: Any  # [R, T] int32, the token after each, -1 where it is not known
    previous: PyTree  # features of the token before the chunk, [R, ...]


class Output(NamedTuple):
    """Output of a step for the host, for its R rows: all B slots, or the given slots in their order."""

    tokens: Array  # [R, K+1] int32, the committed tokens, then -1
    length: Array  # [R] int32, number of tokens of the row with these; L in a vacant slot
    finished: Array  # [R] int32, decode.RUNNING or the reason why the row has ended
    num_drafts: Array  # [R] int32, number of draft tokens of the row
    num_accepted: Array  # [R] int32, number of accepted ones; 0 in rows that were not active
    totals: metrics.Totals  # the counts of each row so far
    log_probs: LogProbs | None  # of the committed tokens, fields [R, K+1, ...]; None if not asked for


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
    check_memory(model, proposer)
    capacities = capacities or Capacities()
    if isinstance(model.apply, OnMesh):
        model.apply.check_batch(num_slots)
    if capacities.logprobs > model.vocab_size:
        raise ValueError(f"logprobs must be at most V = {model.vocab_size}, got {capacities.logprobs}")
    table = None
    if pool is not None:
        table = jnp.full((num_slots, -(-max_length // pool[1])), NO_PAGE, jnp.int32)
        check_pages(model, proposer, Pages(jnp.zeros_like(table), *pool), num_slots, max_length)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_slots, *x.shape)), neutral(capacities))
    if rows.guide is not None:
        tables = GrammarTables(capacities, model.vocab_size)
        arrays = jnp.asarray(tables.token_classes), jnp.asarray(tables.transitions)
        rows = rows._replace(guide=Guide(*arrays, rows.guide.grammar, rows.guide.initial))
    zeros = jnp.zeros(num_slots, jnp.int32)
    guided_state = None if rows.guide is None else zeros
    tokens = jnp.zeros((num_slots, max_length), jnp.int32)
    context = Context(tokens, zeros, zeros > 0, zeros, guided_state, table)
    sizes = num_slots, *((num_slots, max_length) if pool is None else pool)
    state = decode.State(
        context=context,
        cache=model.init_memory(*sizes),
        proposer=proposer.init_memory(*sizes),
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


def with_pages(state: decode.State, table: Array) -> decode.State:
    """Replace the page table [B, P] int32. Rows get pages before a chunk or a step writes to them."""
    return state._replace(context=state.context._replace(pages=table))


def with_grammars(state: decode.State, token_classes: Array, transitions: Array) -> decode.State:
    """Replace the tables of grammars, arrays as `GrammarTables` has them. The places of rows that go on must stay."""
    guide = state.sampling.guide
    assert guide is not None, "the capacities have grammars"
    guide = guide._replace(token_classes=token_classes, transitions=transitions)
    return state._replace(sampling=state.sampling._replace(guide=guide))


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
        given = chunk, state.context.pages, slots, state.cache, state.proposer
        cache, proposer_state, last, logits = _run_chunk(model, proposer, *given)
        entries = None if num_logprobs is None else logprobs(logits, chunk.following, num_logprobs)
    own = tuple(jax.tree.map(lambda x, row=row: x[row : row + 1], last) for row in range(slots.shape[0]))
    return state._replace(cache=cache, proposer=proposer_state), own, entries


def _run_chunk(
    model: Model,
    proposer: Proposer,
    chunk: Chunk,
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
        own = slots - jax.lax.axis_index(shared.batch_axis) * size
        is_own = (own >= 0) & (own < size)
        own = jnp.where(is_own, own, size)  # out of range, which is read as zeros and not written
        given = chunk, None, own, cache, proposer_state
        cache, proposer_state, last, logits = _run_chunk(model, proposer, *given)
        entries = None
        if num_logprobs is not None:
            entries = logprobs(logits, chunk.following, num_logprobs, axis_name=model.axis_name)

        def of_owner(x: Array) -> Array:
            return jax.lax.psum(jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, 0), shared.batch_axis)

        return cache, (proposer_state, *jax.tree.map(of_owner, (last, entries)))

    operands = proposer, state.proposer, slots, chunk
    specs, out = (WHOLE, shared.of_rows, WHOLE, WHOLE), (shared.of_rows, WHOLE, WHOLE)
    cache, rest = on_devices(model, one_device, state.cache, operands, specs, out)
    return cache, *rest


def step(
    model: Model,
    proposer: Proposer | None,
    state: decode.State,
    rows: Array | None = None,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    use: int = EVERYTHING,
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
        use: which sampling features the step computes, static: the largest `capacities.use_of` of the active rows.
            Any larger number gives the same tokens.
        num_logprobs: how many of the most likely tokens to list beside each committed one, static; None reports no
            log-probabilities.
    """
    sampling, options = state.sampling, {"verifier": verifier, "scorer": scorer, "num_logprobs": num_logprobs}
    before = state._replace(sampling=restrict(sampling, use))
    state, info = decode.step(model, proposer, before, rows=rows, **options)
    counts: Any = before.context.active, state.context.length, state.finished, state.totals
    if rows is not None:
        active, *others = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), counts)
        counts = active & (rows < before.context.active.shape[0]), *others
    active, length, finished, totals = counts
    num_accepted = jnp.where(active, jnp.minimum(info.num_accepted, info.num_drafts), 0)
    output = Output(info.tokens, length, finished, info.num_drafts, num_accepted, totals, info.log_probs)
    return state._replace(sampling=sampling), output


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
        totals = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), state.totals)
    sampling = placed(sampling, guide)
    guided_state = None if sampling.guide is None else np.int32(sampling.guide.initial)
    numbers: Any = buffer, np.int32(length), np.bool(True), np.int32(prompt_length), guided_state
    own: Any = key_data, totals, np.uint32(sample)
    return Row(Context(*numbers), sampling, *own)


def chunk_at(tokens: np.ndarray, start: int, size: int, previous: PyTree) -> Chunk:
    """Return the chunk of `size` tokens that begins at `start` in tokens [length] int32, padded at their end."""
    part, following = (np.full((1, size), fill, np.int32) for fill in (0, -1))
    own, later = tokens[start : start + size], tokens[start + 1 : start + 1 + size]
    part[0, : len(own)], following[0, : len(later)] = own, later
    positions = np.arange(start, start + size, dtype=np.int32)[None]
    inputs: Any = {"tokens": part, "positions": positions, "num_tokens": np.array([len(own)], np.int32)}
    return Chunk(ModelInput(**inputs), following, previous)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return chunks of one row as the rows of one, for `prefill_chunk`."""
    arrays = [(chunk.inputs, chunk.following) for chunk in chunks]
    inputs, following = jax.tree.map(lambda *rows: np.concatenate(rows), *arrays)
    return Chunk(inputs, following, tuple(chunk.previous for chunk in chunks))


def no_features(model: Model, proposer: Proposer | None, state: decode.State, chunk_size: int = 1) -> PyTree:
    """Return placeholders for the features of the token before a prompt, as host arrays [1, ...].

    With the size of the chunks that follow, these need not be traced again where there are no features.
    """
    chunk = joined([chunk_at(np.zeros(1, np.int32), 0, chunk_size, None)])
    slots = np.zeros(1, np.int32)
    _, (last,), _ = jax.eval_shape(_prefill_chunk, model, proposer, state, slots, chunk, num_logprobs=None)
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), last)


class Slots:
    """A state on a device, and the calls that change it, each compiled once for all slots and requests.

    Arguments are small host arrays, or results of earlier calls, so that other processes can repeat the calls.
    Results of calls are not read.

    Args:
        model, proposer, num_slots, max_length, capacities, pool: as `empty` takes them.
        verifier, scorer: as `step` takes them.
        draft_lengths: the numbers of draft tokens K that a step may have; None is the proposer's alone.
        chunk_size: as `no_features` takes it.
        step_sizes: numbers of slots below `num_slots` that a step may compute in place of all; each is a program. There
            are none where devices share the rows.

    Attributes:
        state: the state. The next call reuses its arrays.
        draft_lengths: the numbers of draft tokens, the largest first.
        step_sizes: the numbers of slots of a step, the smallest first and `num_slots` last.
        no_features: features of the token before a prompt, for the first chunk.
    """

    def __init__(
        self,
        model: Model,
        proposer: Proposer | None = None,
        *,
        num_slots: int,
        max_length: int,
        capacities: Capacities | None = None,
        pool: tuple[int, int] | None = None,
        verifier: Verifier = verifiers.rejection,
        scorer: Scorer = scorers.mqa,
        draft_lengths: Sequence[int] | None = None,
        chunk_size: int = 1,
        step_sizes: Sequence[int] = (),
    ):
        self.model, self.proposer = model, proposer or proposers.none()
        self._proposers = {self.proposer.num_draft_tokens: self.proposer}
        if draft_lengths is not None:
            self._proposers = with_draft_lengths(self.proposer, draft_lengths)
            self.proposer = next(iter(self._proposers.values()))
        self.draft_lengths = tuple(self._proposers)
        self.num_slots, self.max_length, self.capacities = num_slots, max_length, capacities or Capacities()
        self.step_sizes = _step_sizes(model, num_slots, step_sizes)
        for each in self._proposers.values():
            self._functions = as_pytrees(verifier, scorer, each)
        self._make_state(pool, chunk_size)

    def _make_state(self, pool: tuple[int, int] | None, chunk_size: int) -> None:
        sizes = {"num_slots": self.num_slots, "max_length": self.max_length, "capacities": self.capacities}
        self.state, self._sharding = _empty_on_devices(self.model, self.proposer, **sizes, pool=pool)
        self.no_features = put(no_features(self.model, self.proposer, self.state, chunk_size), self._sharding)

    def compile(self, chunk_size: int, short_chunks: Sequence[tuple[int, int]] = ()) -> None:
        """Compile every call, while all slots are vacant.

        Args:
            chunk_size: the number of tokens of a chunk that is fed alone.
            short_chunks: the numbers of rows and tokens of each call that feeds short chunks, without
                log-probabilities.
        """
        token = np.zeros(1, np.int32)
        row = request(self.state, token, np.zeros(2, np.uint32), neutral(self.capacities))
        with (
            Programs(4 + len(short_chunks) + len(self._steps())) as programs,
            self.compiling_steps(programs.making),
        ):
            for log_probs in (False, True):
                with programs.making(name_of_chunks(1, chunk_size, log_probs=log_probs)):
                    self.prefill([0], [chunk_at(token, 0, chunk_size, self.no_features)], log_probs=log_probs)
            for num_rows, size in short_chunks:
                with programs.making(name_of_chunks(num_rows, size)):
                    self.prefill([0], [chunk_at(token, 0, size, self.no_features)], num_rows)
            with programs.making("a request enters a slot"):
                self.insert(0, row)
            with programs.making("requests leave their slots"):
                self.evict([0])

    @contextmanager
    def compiling_steps(self, making: Callable[..., AbstractContextManager]) -> Iterator[None]:
        """Compile the programs of `step` in other threads, on CPUs while the context does something else.

        Args:
            making: function of the name of a program, and of the seconds that it has taken, which returns a context for
                the rest of the compilation, such as `Programs.making`.
        """
        if jax.process_count() > 1:  # processes need one order
            yield
            self._run_steps(making)
            return

        def compile_step(name: str, lowered: jax.stages.Lowered, seconds: float) -> None:
            with making(name, seconds):
                lowered.compile()

        on_cpu = jax.default_backend() == "cpu"
        if not on_cpu:  # a compiler for GPUs measures kernels on the device, where nothing else may run meanwhile
            yield
        with ThreadPoolExecutor(COMPILED_AT_A_TIME, "specjax compiler") as executor:
            compiled = []
            for each in self._steps():
                start = time.perf_counter()
                arguments, options = self._step_arguments(*each)
                lowered = _step.lower(*arguments, **options)
                seconds = time.perf_counter() - start
                compiled.append(executor.submit(compile_step, self._name_of_step(*each), lowered, seconds))
            if on_cpu:
                yield
            for future in compiled:
                future.result()
        if not on_cpu:  # a first run prepares more
            self._run_steps(lambda name: nullcontext())

    def _run_steps(self, making: Callable[[str], AbstractContextManager]) -> None:
        """Run each program of `step` once."""
        for use, log_probs, num_draft_tokens, rows in self._steps():
            with making(self._name_of_step(use, log_probs, num_draft_tokens, rows)):
                self.step(use, log_probs=log_probs, num_draft_tokens=num_draft_tokens, rows=rows)

    def _name_of_step(self, use: int, log_probs: bool, num_draft_tokens: int, rows: np.ndarray | None) -> str:
        size = self.num_slots if rows is None else len(rows)
        return name_of_step(NAMES_OF_USES[use], size, log_probs, num_draft_tokens, self.draft_lengths)

    def _steps(self) -> list[tuple[int, bool, int, np.ndarray | None]]:
        """Return the arguments `use`, `log_probs`, `num_draft_tokens` and `rows` of all programs of `step`."""
        uses: list[Any] = [(GREEDY, False, None), (CUT, False, None), (EVERYTHING, False, None)]
        uses += [(EVERYTHING, False, self._no_rows(size)) for size in self.step_sizes[:-1]]
        uses.append((EVERYTHING, True, None))
        return [(use, log_probs, k, rows) for k in self.draft_lengths for use, log_probs, rows in uses]

    def _no_rows(self, size: int) -> np.ndarray:
        return np.full(size, self.num_slots, np.int32)

    def rows_of(self, slots: Sequence[int], log_probs: bool = False) -> np.ndarray | None:
        """Return the argument `rows` of the smallest step that computes these slots; None computes all slots.

        `compile` makes programs with log-probabilities for steps of all slots alone, and for others programs that
        compute everything alone.
        """
        size = next(size for size in self.step_sizes if size >= len(slots))
        if size == self.num_slots or log_probs:
            return None
        rows = self._no_rows(size)
        rows[: len(slots)] = slots
        return rows

    def insert(self, slot: int, row: Row) -> None:
        """Make a vacant slot an active row; see `insert`."""
        self._check(slot)
        self.state = _insert(self.state, np.int32(slot), row)

    def evict(self, slots: Sequence[int]) -> None:
        """Make slots vacant; see `evict`."""
        rows = np.zeros(self.num_slots, bool)
        for slot in slots:
            self._check(slot)
            rows[slot] = True
        self.state = _evict(self.state, rows)

    def set_pages(self, table: np.ndarray) -> None:
        """Replace the page table [B, P] int32, where a number outside the pool is no page."""
        pages = self.state.context.pages
        if pages is None or table.shape != pages.shape or table.dtype != np.int32:
            expected = "None of a dense cache" if pages is None else f"int32 {pages.shape}"
            raise ValueError(f"table must be {expected}, got {table.dtype} {table.shape}")
        self.state = with_pages(self.state, put(table.copy(), self._sharding))

    def set_grammars(self, token_classes: np.ndarray, transitions: np.ndarray) -> None:
        """Replace the tables of grammars, which `GrammarTables` makes; see `with_grammars`."""
        guide = self.state.sampling.guide
        if guide is None:
            raise ValueError("there must be no grammars where Capacities.grammars is 0, got tables")
        shapes = guide.token_classes.shape, guide.transitions.shape
        if (token_classes.shape, transitions.shape) != shapes:
            raise ValueError(f"tables must have shapes {shapes}, got {(token_classes.shape, transitions.shape)}")
        tables = put((token_classes.copy(), transitions.copy()), self._sharding)
        self.state = with_grammars(self.state, *tables)

    def prefill(
        self, slots: Sequence[int], chunks: Sequence[Chunk], num_rows: int = 1, *, log_probs: bool = False
    ) -> tuple[tuple[PyTree, ...], LogProbs | None]:
        """Feed a chunk to each of some vacant slots, by a call of `num_rows` rows; see `prefill_chunk`.

        Args:
            slots: the slots, at most `num_rows`.
            chunks: the chunk of each, as `chunk_at` returns it, all of one size.
            num_rows: how many chunks the call has room for. Each number needs a separate program, and so does each
                size.
            log_probs: whether to return log-probabilities of the tokens that follow, too, with as many of the most
                likely tokens as the capacities say.

        Returns:
            The features of the last token of each row, and the log-probabilities.
        """
        for slot in slots:
            self._check(slot)
        num_free = num_rows - len(slots)
        if num_free < 0 or len(chunks) != len(slots):
            raise ValueError(f"slots and chunks must be at most {num_rows}, got {len(slots)} and {len(chunks)}")
        nothing = chunk_at(np.zeros(0, np.int32), 0, chunks[0].following.shape[1], self.no_features)
        rows = np.array([*slots, *[self.num_slots] * num_free], np.int32)
        given = self.model, self.proposer, self.state, rows, joined([*chunks, *[nothing] * num_free])
        num_logprobs = self.capacities.logprobs if log_probs else None
        self.state, features, entries = _prefill_chunk(*given, num_logprobs=num_logprobs)
        return features, entries

    def step(
        self,
        use: int = EVERYTHING,
        *,
        log_probs: bool = False,
        num_draft_tokens: int | None = None,
        rows: np.ndarray | None = None,
    ) -> Output:
        """Take a step in all active rows; see `step`.

        Args:
            use: as `step` takes it. A step with log-probabilities computes everything.
            log_probs: whether to list the most likely tokens, as many as the capacities say.
            num_draft_tokens: one of `draft_lengths`; None is the largest.
            rows: result of `rows_of` for the active slots.
        """
        arguments, options = self._step_arguments(use, log_probs, num_draft_tokens, rows)
        self.state, output = _step(*arguments, **options)
        return output

    def _step_arguments(
        self, use: int, log_probs: bool, num_draft_tokens: int | None, rows: np.ndarray | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the function `step` in a call of the method."""
        if rows is not None and len(rows) not in self.step_sizes[:-1]:
            raise ValueError(f"rows must be None or have one of the sizes {self.step_sizes[:-1]}, got {len(rows)} rows")
        proposer = self.proposer if num_draft_tokens is None else self._proposers[num_draft_tokens]
        functions = dict(zip(("verifier", "scorer"), self._functions, strict=True))
        num_logprobs = self.capacities.logprobs if log_probs else None
        options = {"use": EVERYTHING if log_probs else use, "num_logprobs": num_logprobs}
        return (self.model, proposer, self.state, rows), functions | options

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be in [0, {self.num_slots}), got {slot}")


def _step_sizes(model: Model, num_slots: int, given: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of slots that steps compute, the smallest first and all of them last."""
    if not isinstance(given, Sequence) or not all(is_integer(size) and 1 <= size < num_slots for size in given):
        raise ValueError(f"step_sizes must be integers in [1, num_slots - 1 = {num_slots - 1}], got {given!r}")
    if isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None:
        return (num_slots,)
    return (*sorted(set(given)), num_slots)


def _empty_on_devices(model: Model, proposer: Proposer, **sizes: Any) -> tuple[decode.State, Sharding]:
    """Return the result of `empty`, and the sharding for arrays of the host.

    Each array is where the calls leave it, and committed to be there, so that they are compiled once.
    """
    if not isinstance(model.apply, OnMesh):
        state = _empty(model, proposer, **sizes)
        sharding = _sharding_of_committed(model.params, proposer) or state.context.tokens.sharding
        return jax.device_put(state, sharding), sharding
    shared = model.apply
    shapes = jax.eval_shape(partial(empty, **sizes), model, proposer)
    specs = state_rows.specs(shapes, shared.of_rows)
    specs = specs._replace(cache=jax.tree.map(lambda _: shared.cache_spec, shapes.cache))
    shardings = jax.tree.map(partial(NamedSharding, shared.mesh), specs)
    return jax.jit(partial(empty, **sizes), out_shardings=shardings)(model, proposer), shared.whole


def _sharding_of_committed(*trees: PyTree) -> Sharding | None:
    """Return the sharding that replicates an array on the devices of committed arrays; None without these."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and leaf.committed:
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
                return NamedSharding(sharding.mesh, WHOLE)
            return sharding
    return None


def _readable(function: Callable) -> Callable:
    """Replicate the results of a function of a model on every device, so that each process can read them."""

    @wraps(function)
    def call(model: Model, *args: Any, **options: Any) -> Any:
        state, *results = function(model, *args, **options)
        if isinstance(model.apply, OnMesh):
            results = jax.lax.with_sharding_constraint(results, model.apply.whole)
        return state, *results

    return call


_empty = jax.jit(empty, static_argnames=("num_slots", "max_length", "capacities", "pool"))
_insert = jax.jit(insert, donate_argnums=0)
_evict = jax.jit(evict, donate_argnums=0)
_prefill_chunk = jax.jit(_readable(prefill_chunk), donate_argnums=2, static_argnames="num_logprobs")
_step = jax.jit(_readable(step), donate_argnums=2, static_argnames=("use", "num_logprobs"))
