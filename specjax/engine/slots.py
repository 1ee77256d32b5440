"""Rows of a batch that requests enter and leave, while its arrays, and so its compiled programs, stay the same.

The functions are pure. A state is a `decode.State` whose sampling parameters have fixed sizes. A *slot* is a row of it;
one without a request is *vacant*: its row is not active, and its length is L, the size of the token buffer.

A request enters in two parts: `prefill_chunk` feeds its tokens to the vacant slot chunk by chunk, between the steps of
the others, and then `insert` makes the row active. A call of it feeds one chunk each to some slots, side by side.
The steps in between do not disturb the chunks. In a pool of pages they write nothing for rows that are not active. In a
dense cache they write the last two slots of a vacant row, which a request needs only if it fills the buffer but for one
token, and then its first step writes them again. Other state of a proposer for a row may change in a step, so no step
comes between the last chunk and `insert`.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import decode, proposers, scorers, verifiers
from specjax.decoding.binding import as_pytrees
from specjax.decoding.compiling import compiled, gains_from_whole_sums
from specjax.decoding.drafters import commit_of
from specjax.decoding.log_probs import LogProbs
from specjax.engine.draft_length import name_of_drafts, with_draft_lengths
from specjax.engine.empty_slots import empty_on_devices
from specjax.engine.held import Held, feed_held, hold_step, may_hold
from specjax.engine.report import Programs, name_of_chunks, name_of_step
from specjax.engine.sizes import checked_step_sizes
from specjax.engine.slot_calls import Chunk, Output, chunk_at, mixed_step, packed, prefill_chunk, step, takes_packed
from specjax.engine.slot_rows import Row, evict, insert, kept_of, request, with_grammars, with_kept, with_pages
from specjax.models.decoder import with_room
from specjax.parallel import OnMesh, put
from specjax.parallel.turns import in_turn
from specjax.sampling.capacities import Capacities, Needs, neutral
from specjax.types import Model, Proposer, PyTree, Scorer, Verifier

MIXED_USE = Needs.CUT  # what mixed steps compute; the parameters beyond it take a step of many slots longer
COMPILED_AT_A_TIME = min(4, os.cpu_count() or 1)  # programs, while others are traced
NAMES_OF_USES: dict[int, str] = {
    Needs.GREEDY: "greedy",
    Needs.CUT: "temperatures and cuts",
    Needs.EVERYTHING: "all parameters",
}


def keeps_rows(model: Model, proposer: Proposer | None) -> bool:
    """Return whether pages and the last features do not say all that target and proposer keep of a prompt."""
    return model.init_rows is not None or (proposer is not None and commit_of(proposer) is not None)


def no_features(model: Model, proposer: Proposer | None, state: decode.State, chunk_size: int = 1) -> PyTree:
    """Return placeholders for the features of the token before a prompt, as host arrays [1, ...].

    With the size of the chunks that follow, these need not be traced again where there are no features.
    """
    one = chunk_at(np.zeros(1, np.int32), 0, chunk_size, None)
    chunk = packed([0], [one], 1, chunk_size, no_slot=1, no_features=None)
    _, (last,), _ = jax.eval_shape(_prefill_chunk, model, proposer, state, chunk, num_logprobs=None)
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), last)


class StepProgram(NamedTuple):
    """The arguments of `Slots.step` that decide which program runs."""

    use: int = Needs.EVERYTHING  # as `step` takes it
    log_probs: bool = False
    num_draft_tokens: int | None = None
    rows: np.ndarray | None = None  # of which the size alone counts
    prompts: Chunk | None = None  # of a mixed step, of which the sizes alone count


class PromptProgram(NamedTuple):
    """The arguments of `Slots.prefill` that decide which program runs."""

    prompts: Chunk  # of which the sizes alone count
    log_probs: bool = False


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
        tile_size: tokens of a tile, of which chunks of prompts fill several in a call.
        mixed_sizes: pairs of numbers, of the slots of a step, one of `step_sizes` or all, and of the tokens of prompts
            that it feeds in the same program, in whole tiles.
        room: the positions by which rotary positions go, where their scaling depends on the room of a row; None is
            `max_length`. Where `max_length` depends on the requests, this must not: each would get other tokens beside
            others.

    Attributes:
        state: the state. The next call reuses its arrays.
        devices: the devices that have it. Threads with slots on the same devices take turns to call them.
        draft_lengths: the numbers of draft tokens, the largest first.
        step_sizes: the numbers of slots of a step, the smallest first and `num_slots` last.
        tile_size: tokens of a tile; None where target or proposer take no packed calls, and a call has one chunk.
        mixed_sizes: the sizes of mixed steps.
        no_features: features of the token before a prompt, for the first chunk.
        keeps_rows: whether target or proposer keep more of a prompt than its pages and its last features, which `kept`
            returns.
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
        tile_size: int | None = None,
        mixed_sizes: Sequence[tuple[int, int]] = (),
        room: int | None = None,
    ):
        room = max_length if room is None else room
        self.model, self.proposer = with_room(model, room), _with_room(proposer or proposers.none(), room)
        self._proposers = {self.proposer.num_draft_tokens: self.proposer}
        if draft_lengths is not None:
            self._proposers = with_draft_lengths(self.proposer, draft_lengths)
            self.proposer = next(iter(self._proposers.values()))
        self.draft_lengths = tuple(self._proposers)
        self.keeps_rows = keeps_rows(model, self.proposer)
        self.num_slots, self.max_length, self.capacities = num_slots, max_length, capacities or Capacities()
        self.step_sizes = _step_sizes(model, num_slots, step_sizes)
        self.tile_size = tile_size if takes_packed(model, self.proposer) else None
        self.mixed_sizes = tuple(mixed_sizes)
        self._sums_whole = gains_from_whole_sums(self.model)
        for each in self._proposers.values():
            self.verifier, self._scorer = as_pytrees(verifier, scorer, each)
        self._make_state(pool, chunk_size)
        self._held = None
        if len(self._proposers) > 1 and 0 in self._proposers and may_hold(model, self._proposers[0]):
            self._held = Held(self.no_features, num_slots, self._sharding)

    def _make_state(self, pool: tuple[int, int] | None, chunk_size: int) -> None:
        self.state, self._sharding = empty_on_devices(
            self.model,
            self.proposer,
            num_slots=self.num_slots,
            max_length=self.max_length,
            capacities=self.capacities,
            pool=pool,
        )
        self.devices = self._sharding.device_set
        self.no_features = put(no_features(self.model, self.proposer, self.state, chunk_size), self._sharding)

    def compile(
        self,
        chunk_size: int,
        prompt_sizes: Sequence[int] = (),
        uses: Collection[tuple[int, bool]] | None = None,
        draft_lengths: Collection[int] | None = None,
    ) -> None:
        """Compile calls, while all slots are vacant.

        Args:
            chunk_size: the number of tokens of a call with log-probabilities.
            prompt_sizes: the numbers of tokens of the calls without them.
            uses: the pairs of `use` and `log_probs` that calls are compiled for, as `step` takes them; None is every
                pair. Others are compiled where they are first made.
            draft_lengths: as `steps` takes them.
        """
        row = request(self.state, np.zeros(1, np.int32), np.zeros(2, np.uint32), neutral(self.capacities))
        steps = self.steps(uses, draft_lengths)
        sizes_to_feed = () if self._held is None else self.step_sizes
        sizes = sorted(prompt_sizes or (chunk_size,), reverse=True)  # the longest to compile first
        of_prompts = [PromptProgram(self._no_prompts(size)) for size in sizes]
        if uses is None or any(log_probs for _, log_probs in uses):
            of_prompts.append(PromptProgram(self._no_prompts(chunk_size), log_probs=True))
        with (
            Programs(2 + 2 * self.keeps_rows + sum(map(len, (of_prompts, steps, sizes_to_feed)))) as programs,
            self.compiling_programs([*steps, *of_prompts], programs.making),
        ):
            if self.keeps_rows:
                with programs.making("states of prompts are kept"):
                    kept = self.kept(0)
                with programs.making("states of prompts are put back"):
                    self.put_back(0, kept)
            with programs.making("a request enters a slot"):
                self.insert(0, row)
            with programs.making("requests leave their slots"):
                self.evict([0])
            for size in sizes_to_feed:
                with programs.making(f"features that have waited, of {size} slots"):
                    self.feed(self._no_rows(size) if size < self.num_slots else None)

    @contextmanager
    def compiling_programs(
        self, programs: Sequence[StepProgram | PromptProgram], making: Callable[..., AbstractContextManager]
    ) -> Iterator[None]:
        """Compile programs in other threads, on CPUs while the context does something else.

        Args:
            programs: the programs.
            making: function of the name of a program, and of the seconds that it has taken, which returns a context for
                the rest of the compilation, such as `Programs.making`.
        """
        if jax.process_count() > 1:  # processes need one order
            yield
            self._run_once(programs, making)
            return

        def compile_program(name: str, lowered: jax.stages.Lowered, seconds: float) -> None:
            with making(name, seconds):
                lowered.compile()

        on_cpu = jax.default_backend() == "cpu"
        if not on_cpu:  # a compiler for GPUs measures kernels on the device, where nothing else may run meanwhile
            yield
        with ThreadPoolExecutor(COMPILED_AT_A_TIME, "specjax compiler") as executor:
            compiled = []
            for program in programs:
                start = time.perf_counter()
                lowered = self.lowered(program)
                seconds = time.perf_counter() - start
                compiled.append(executor.submit(compile_program, self._name_of(program), lowered, seconds))
            if on_cpu:
                yield
            for future in compiled:
                future.result()
        if not on_cpu:  # a first run prepares more
            self._run_once(programs, lambda name: nullcontext())

    def _run_once(
        self, programs: Sequence[StepProgram | PromptProgram], making: Callable[[str], AbstractContextManager]
    ) -> None:
        """Run each program once."""
        for program in programs:
            with making(self._name_of(program)):
                if isinstance(program, PromptProgram):
                    self.prefill([], [], *self.tiles_of(program.prompts.following.size), log_probs=program.log_probs)
                    continue
                if program.prompts is not None:
                    self.mixed_step((self._size_of(program), program.prompts.following.size), [], [], [])
                    continue
                self.step(
                    program.use,
                    log_probs=program.log_probs,
                    num_draft_tokens=program.num_draft_tokens,
                    rows=program.rows,
                )

    def lowered(self, program: StepProgram | PromptProgram) -> jax.stages.Lowered:
        """Return a program that is traced and not compiled. Another thread may make calls meanwhile."""
        return self._pass_to(program, lambda function: function.lower)

    def _size_of(self, program: StepProgram) -> int:
        return self.num_slots if program.rows is None else len(program.rows)

    def _name_of(self, program: StepProgram | PromptProgram) -> str:
        if isinstance(program, PromptProgram):
            return name_of_chunks(program.prompts.following.size, log_probs=program.log_probs)
        size = self._size_of(program)
        k = self.draft_lengths[0] if program.num_draft_tokens is None else program.num_draft_tokens
        drafts = name_of_drafts(self.proposer, k) if len(self.draft_lengths) > 1 else None
        name = name_of_step(NAMES_OF_USES[program.use], size, program.log_probs, drafts)
        if program.prompts is None:
            return name
        return f"{name}, beside {name_of_chunks(program.prompts.following.size)}"

    def steps(
        self, uses: Collection[tuple[int, bool]] | None = None, draft_lengths: Collection[int] | None = None
    ) -> list[StepProgram]:
        """Return the programs of `step` that requests may need.

        Args:
            uses: as `compile` takes them.
            draft_lengths: the numbers of draft tokens of these steps, where there are several; None is all.
        """
        steps = self._steps()
        if draft_lengths is not None and len(self.draft_lengths) > 1:
            steps = [step for step in steps if step.num_draft_tokens in draft_lengths]
        if uses is None:
            return steps
        # Steps of some slots and mixed ones have one program for all uses.
        has_one = [step.rows is not None or step.prompts is not None for step in steps]
        each = zip(steps, has_one, strict=True)
        return [step for step, is_one in each if is_one or (step.use, step.log_probs) in uses]

    def _steps(self) -> list[StepProgram]:
        """Return all programs of `step` that requests may need."""
        programs = []
        for k in self.draft_lengths:
            programs += [StepProgram(use, num_draft_tokens=k) for use in Needs]
            programs += [StepProgram(num_draft_tokens=k, rows=self._no_rows(size)) for size in self.step_sizes[:-1]]
            programs.append(StepProgram(num_draft_tokens=k, log_probs=True))
        for size, num_tokens in self.mixed_sizes:
            rows = self._no_rows(size) if size < self.num_slots else None
            programs.append(StepProgram(MIXED_USE, rows=rows, prompts=self._no_prompts(num_tokens)))
        return programs

    def _no_prompts(self, num_tokens: int) -> Chunk:
        return self._packed([], [], *self.tiles_of(num_tokens))

    def _no_rows(self, size: int) -> np.ndarray:
        return np.full(size, self.num_slots, np.int32)

    def rows_of(self, slots: Sequence[int], log_probs: bool = False) -> np.ndarray | None:
        """Return the argument `rows` of the smallest step that computes these slots; None computes all slots.

        `compile` makes programs with log-probabilities for steps of all slots alone, and for others programs that
        compute everything alone.
        """
        size = next(size for size in self.step_sizes if size >= len(slots))
        return None if log_probs else self._filled(slots, size)

    def _filled(self, slots: Sequence[int], size: int) -> np.ndarray | None:
        """Return the argument `rows` of a step of `size` slots that computes these."""
        if size == self.num_slots:
            return None
        rows = self._no_rows(size)
        rows[: len(slots)] = slots
        return rows

    @in_turn
    def insert(self, slot: int, row: Row) -> None:
        """Make a vacant slot an active row; see `insert`."""
        self._check(slot)
        self.state = _insert(self.state, np.int32(slot), row)
        if self._held is not None:
            self._held.clear(slot)

    @in_turn
    def evict(self, slots: Sequence[int]) -> None:
        """Make slots vacant; see `evict`."""
        rows = np.zeros(self.num_slots, bool)
        for slot in slots:
            self._check(slot)
            rows[slot] = True
        self.state = _evict(self.state, rows)

    @in_turn
    def kept(self, slot: int) -> PyTree:
        """Return the rows of a slot after a chunk, which are not in its pages; see `kept_of`."""
        self._check(slot)
        return _kept_of(self.state, np.int32(slot))

    @in_turn
    def put_back(self, slot: int, kept: PyTree) -> None:
        """Let a vacant slot, whose pages are another's, go on from what `kept` has returned of the other."""
        self._check(slot)
        self.state = _with_kept(self.state, np.int32(slot), kept)

    @in_turn
    def set_pages(self, table: np.ndarray) -> None:
        """Replace the page table [B, P] int32, where a number outside the pool is no page."""
        pages = self.state.context.pages
        if pages is None or table.shape != pages.shape or table.dtype != np.int32:
            expected = "None of a dense cache" if pages is None else f"int32 {pages.shape}"
            raise ValueError(f"table must be {expected}, got {table.dtype} {table.shape}")
        self.state = with_pages(self.state, put(table.copy(), self._sharding))

    @in_turn
    def set_grammars(self, token_classes: np.ndarray, transitions: np.ndarray) -> None:
        """Replace the tables of grammars, which `GrammarTables` makes; see `with_grammars`."""
        guide = self.state.sampling.guide
        if guide is None:
            raise ValueError("there must be no grammars where Capacities.grammars is 0, got tables")
        shapes = guide.token_classes.shape, guide.transitions.shape
        if (token_classes.shape, transitions.shape) != shapes:
            raise ValueError(f"tables must have shapes {shapes}, got {(token_classes.shape, transitions.shape)}")
        classes: Any = put(token_classes.copy(), self._sharding)
        self.state = with_grammars(self.state, classes, put(transitions.copy(), self._sharding))

    def tiles_of(self, num_tokens: int) -> tuple[int, int]:
        """Return the number and the size of the tiles of a call that feeds so many tokens of prompts."""
        size = num_tokens if self.tile_size is None else self.tile_size
        return num_tokens // size, size

    @in_turn
    def prefill(
        self,
        slots: Sequence[int],
        chunks: Sequence[Chunk],
        num_tiles: int = 1,
        size: int | None = None,
        *,
        log_probs: bool = False,
    ) -> tuple[tuple[PyTree, ...], LogProbs | None]:
        """Feed a chunk to each of some vacant slots, by one packed call; see `prefill_chunk`.

        Args:
            slots: the slots.
            chunks: the chunk of each, as `chunk_at` returns it, of a multiple of `size` tokens. It fills one tile where
                target or proposer take no packed calls.
            num_tiles: how many tiles the call has. Each number needs a separate program, and so does each size.
            size: tokens of a tile; None is the size of the first chunk.
            log_probs: whether to return log-probabilities of the tokens that follow, too, with as many of the most
                likely tokens as the capacities say.

        Returns:
            The features of the last token of each chunk, then others, and the log-probabilities [1, C, ...].
        """
        prompts = self._packed(slots, chunks, num_tiles, chunks[0].following.shape[1] if size is None else size)
        self.state, features, entries = self._pass_to(PromptProgram(prompts, log_probs))
        return features, entries

    def _packed(self, slots: Sequence[int], chunks: Sequence[Chunk], num_tiles: int, width: int) -> Chunk:
        """Return chunks as one packed call of tiles of `width` tokens, after checks."""
        for slot in slots:
            self._check(slot)
        sizes = [chunk.following.shape[1] for chunk in chunks]
        if sum(sizes) > num_tiles * width or len(chunks) != len(slots) or any(each % width for each in sizes):
            raise ValueError(
                f"chunks must fill at most {num_tiles} tiles of {width} tokens, one chunk for each slot, got chunks of "
                f"{sizes} tokens for {len(slots)} slots"
            )
        return packed(slots, chunks, num_tiles, width, no_slot=self.num_slots, no_features=self.no_features)

    @in_turn
    def step(
        self,
        use: int = Needs.EVERYTHING,
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
        program, held = StepProgram(use, log_probs, num_draft_tokens, rows), self._held
        if held is not None and held.must_be_fed(rows, holds=num_draft_tokens == 0):
            self.feed(rows)
        if held is None or num_draft_tokens != 0:
            self.state, output = self._pass_to(program)
            return output
        self.state, held.features, output = self._pass_to(program)
        held.add(rows)
        return output

    @in_turn
    def mixed_step(
        self, size: tuple[int, int], active: Sequence[int], slots: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[Output, tuple[PyTree, ...]]:
        """Take a step in all active rows, none of which needs more than `MIXED_USE`, and feed chunks to vacant slots.

        See `slot_calls.mixed_step`.

        Args:
            size: one of `mixed_sizes`.
            active: the active slots, at most as many as the size says.
            slots, chunks: as `prefill` takes them.

        Returns:
            The output for the active slots in their order, or for all slots where the step has so many, and the
            features of the last token of each chunk, then others.
        """
        prompts = self._packed(slots, chunks, *self.tiles_of(size[1]))
        program = StepProgram(MIXED_USE, rows=self._filled(active, size[0]), prompts=prompts)
        self.state, output, features = self._pass_to(program)
        return output, features

    @in_turn
    def feed(self, rows: np.ndarray | None = None) -> None:
        """Give the drafter the features that plain steps have held for it; `rows` as `step` takes it."""
        held = self._held
        assert held is not None, "plain steps hold features"
        self.state = _feed_held(self.proposer, self.state, held.features, held.counts, rows)
        held.clear()

    def _pass_to(
        self, program: StepProgram | PromptProgram, form: Callable[[Any], Callable] = lambda function: function
    ) -> Any:
        """Call the function of a program, in a form such as `function.lower`, with the arguments of the program."""
        models, num_logprobs = (self.model, self.proposer), self.capacities.logprobs if program.log_probs else None
        if isinstance(program, PromptProgram):
            return form(_prefill_chunk)(*models, self.state, program.prompts, num_logprobs=num_logprobs)
        rows, k, held = program.rows, program.num_draft_tokens, self._held
        options: dict[str, Any] = {"verifier": self.verifier, "scorer": self._scorer}
        if program.prompts is not None:
            return form(_mixed_step)(*models, self.state, program.prompts, rows, use=MIXED_USE, **options)
        options["use"] = Needs.EVERYTHING if program.log_probs else program.use
        options["num_logprobs"] = num_logprobs
        if rows is not None and len(rows) not in self.step_sizes[:-1]:
            raise ValueError(f"rows must be None or have one of the sizes {self.step_sizes[:-1]}, got {len(rows)} rows")
        proposer = self.proposer if k is None else self._proposers[k]
        step, given = _step, (self.model, proposer, self.state)
        if held is not None and k == 0:
            step, given = _hold_step, (self.model, self.state, held.features, held.counts)
        size = self._size_of(program)
        function = step.for_rows(size, size * (1 + proposer.num_draft_tokens)) if self._sums_whole else step.usual
        return form(function)(*given, rows, **options)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be in [0, {self.num_slots}), got {slot}")


def _with_room(proposer: Proposer, room: int) -> Proposer:
    """Return a proposer whose models turn their heads as rows with room for so many positions do."""

    def is_model(x: object) -> bool:
        return isinstance(x, Model)

    return jax.tree.map(lambda x: with_room(x, room) if is_model(x) else x, proposer, is_leaf=is_model)


def _step_sizes(model: Model, num_slots: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of slots that steps compute, the smallest first and all of them last."""
    sizes = checked_step_sizes(sizes, num_slots)
    if isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None:
        return (num_slots,)
    return (*sizes, num_slots)


def _readable(function: Callable) -> Callable:
    """Replicate the results of a function of a model on every device, so that each process can read them."""

    @wraps(function)
    def call(model: Model, *args: Any, **options: Any) -> Any:
        state, *results = function(model, *args, **options)
        if isinstance(model.apply, OnMesh):
            results = jax.lax.with_sharding_constraint(results, model.apply.whole)
        return state, *results

    return call


_insert = jax.jit(insert, donate_argnums=0)
_evict = jax.jit(evict, donate_argnums=0)
_kept_of = jax.jit(kept_of)
_with_kept = jax.jit(with_kept, donate_argnums=0)
_prefill_chunk = jax.jit(_readable(prefill_chunk), donate_argnums=2, static_argnames="num_logprobs")
_hold_step = compiled(hold_step, donate_argnums=(1, 2), static_argnames=("use", "num_logprobs"))
_feed_held = jax.jit(feed_held, donate_argnums=1)
_mixed_step = jax.jit(_readable(mixed_step), donate_argnums=2, static_argnames="use")
_step = compiled(_readable(step), donate_argnums=2, static_argnames=("use", "num_logprobs"))
