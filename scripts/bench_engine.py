"""Measure `specjax.Engine` under load on this machine's accelerator, with the embedded family or random weights.

    python scripts/bench_engine.py
    python scripts/bench_engine.py --preset 8b-1b --json engine.json
    python scripts/bench_engine.py --preset embedded --parts loads --requests 8
    python scripts/bench_engine.py --preset 8b-eagle3 --parts auto --streams 8 64

The script prints each row as soon as it is measured. Models are made once, engines once for each setting. The parts:

* loads: requests of mixed lengths, in closed loops and with Poisson arrivals at 70 % of the capacity of the largest
  loop, or at the rates of --arrivals. Clients are streams: they see each token as its text becomes certain. With random
  weights they see ids alone, because most of their tokens have no text in the tokenizer of the embedded family.
* apart: the loads, by an engine without mixed steps, which feed prompts and decode in one program.
* mixed: the time of a step, of a call that feeds prompts, and of a mixed step that does both, for each of the engine's
  `mixed_sizes`.
* sizes: closed loops of a few streams by an engine of as many slots as for loads, against an engine of as many slots as
  there are streams.
* full: requests of equal lengths, as many as slots, against `specjax.generate` of the same batch: tokens/s while all
  slots are active, and of the whole run. With 8b-1b also for other numbers of slots, and with drafts that are accepted
  at given rates.
* static: four times the requests of a load, of mixed lengths, all there at the start, against static batches of as many
  as there are slots, in that order.
* auto: tokens/s by an engine that chooses K by what its steps cost, against the better of one with the largest K and
  one without a drafter, for each number of streams and at each rate of acceptance. --streams replaces the numbers of
  streams of the preset. All rows share the three engines, which have as many slots as the most streams, and programs
  for steps of each number of streams. The engines compile only what these requests need, and steps that compute all
  parameters, which the engine that chooses K measures. The runs of the three take turns where IN_TURNS slots suffice.
  Each run has other requests, and the ratio is the median of the ratios of runs with the same requests. A row also says
  which share of the steps had each K.
* entering: the time between pieces of running streams while a long prompt is fed, against a step and a
  chunk.
* shared: the time to the first token of long prompts of which 90 % are shared, against prompts that share nothing.
* kernels: the launches of a step of some slots and of all, of a call that feeds a chunk, of the largest mixed step, and
  of a request that enters a slot and leaves it, those that take most of their time first. On GPUs alone.
* gap: the share of the time in which the device waits for the host, by JAX's profiler: gaps of more than 10 us between
  two operations. On GPUs alone.

A part says how often something was compiled after the engine had started, and how many pages were in use when all
requests had ended; both must be 0.
"""

import argparse
import asyncio
import gc
import itertools
import json
import math
import statistics
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from bench_decode import drafter
from bench_decode import load as load_models
from jax.tree_util import Partial
from launches import largest, profiled, waits_of_device

import specjax
from specjax import SamplingParams, decode, models, sampling, verifiers
from specjax.decoding.binding import as_pytree
from specjax.engine import slot_rows
from specjax.engine.engine import Stats
from specjax.engine.sizes import default_sizes
from specjax.engine.slot_calls import chunk_at
from specjax.engine.slots import MIXED_USE
from specjax.engine.step_times import occupied
from specjax.models.directory import Checkpoint
from specjax.sampling.capacities import Needs, neutral
from specjax.server.loads import (
    COLUMNS,
    COUNTS,
    Load,
    Send,
    Work,
    closed_loop,
    figures,
    gaps,
    header,
    load_row,
    make_works,
    poisson,
    spread,
    table_row,
)

TEMPERATURE = 0.8
UTILISATION = 0.7  # of the capacity, for Poisson arrivals
SHARED = 0.9  # of long prompts
REPEATS = 3  # runs of full and mixed batches, whose medians count
PROMPTS = 5  # of each kind, for the time to the first token
POLL = 0.05  # seconds between looks at the engine
PROFILED = 6  # calls of each kind whose launches are listed
IN_TURNS = 64  # slots of three engines whose caches fit on a device together

prefill = jax.jit(decode.prefill, static_argnames="max_length")


class Setting(NamedTuple):
    """Sizes of the measurements with a preset."""

    num_drafts: int
    num_slots: int  # of the engine for loads
    concurrency: tuple[int, ...]  # of the closed loops
    prompts: tuple[int, int]  # tokens, mixed
    outputs: tuple[int, int]
    full: tuple[tuple[int, int, float | None], ...]  # slots, K, and the rate at which drafts are accepted, if set
    full_lengths: tuple[int, int]  # tokens of prompt and output
    long: int  # tokens of a long prompt
    requests: int = 64
    rate: float | None = None  # at which drafts of loads are accepted, if set
    auto: tuple[tuple[int, float], ...] = ()  # streams, and the rate at which drafts are accepted
    auto_lengths: tuple[int, int] = (64, 500)  # tokens of prompt and output
    arrivals: tuple[float, ...] = ()  # Poisson arrivals a second; none: a share of the capacity of the largest loop


# The longest mixed lengths together are as long as a full batch, so that both have the same programs.
SETTINGS = {
    "embedded": Setting(
        4,
        8,
        (1, 4, 8),
        (16, 64),
        (32, 128),
        ((8, 4, None), (8, 0, None)),
        (64, 128),
        1024,
        auto=((8, 0.3), (8, 0.9)),
    ),
    "8b-1b": Setting(
        0,
        64,
        (1, 8, 64),
        (128, 512),
        (64, 256),
        ((1, 0, None), (8, 0, None), (64, 0, None), (256, 0, None), (1, 5, 0.7), (1, 5, 1.0)),
        (512, 256),
        8192,
        256,
    ),
}
SETTINGS["1b-100m"] = SETTINGS["8b-1b"]
SETTINGS["8b-eagle3"] = SETTINGS["8b-1b"]._replace(
    num_drafts=3,
    rate=0.7,
    full=((1, 3, 0.7), (64, 3, 0.7)),
    auto=tuple((streams, rate) for streams in (1, 8, 64, 256) for rate in (0.3, 0.9)),
    auto_lengths=(512, 256),
)


class Compilations:
    """Counts what XLA compiles, or loads from the cache of programs, from now on."""

    def __init__(self):
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration: float, **kwargs: Any) -> None:
        self.number += event == "/jax/core/compile/backend_compile_duration"


class Bench:
    """The models of a preset, and the engines that run them.

    Args:
        preset: names the models and the setting.
        num_requests: requests of a load.
        num_slots: slots of the engine for loads, and the streams of its closed loop.
        arrivals: Poisson arrivals a second of loads; none is a share of the capacity.
        streams: numbers of streams for auto; none takes the numbers of the preset.

    Attributes:
        compile_s: seconds that the start of the last engine took.
    """

    def __init__(
        self,
        preset: str,
        num_requests: int | None = None,
        num_slots: int | None = None,
        arrivals: tuple[float, ...] = (),
        streams: tuple[int, ...] = (),
    ):
        self.setting = SETTINGS[preset]._replace(arrivals=arrivals)
        if streams:
            rates = dict.fromkeys(rate for _, rate in self.setting.auto)
            self.setting = self.setting._replace(auto=tuple(itertools.product(streams, rates)))
        if num_slots is not None:
            self.setting = self.setting._replace(num_slots=num_slots, concurrency=(num_slots,), requests=4 * num_slots)
        if num_requests is not None:
            self.setting = self.setting._replace(requests=num_requests)
        self.target, self.draft = load_models(preset)
        self.tokenizer = Checkpoint(models.EMBEDDED / "target").tokenizer()
        self.has_text = preset == "embedded"
        self.source = source_of(preset, self.tokenizer)
        self.compilations = Compilations()

    def proposer(self, num_drafts: int) -> Any:
        return drafter(self.draft, num_drafts)

    @contextmanager
    def engine(self, num_slots: int, max_length: int, num_drafts: int, rate: float | None = None, **options: Any):
        """Give an engine, which ends with the block."""
        sizes = {"num_slots": num_slots, "max_length": max_length + 2 * (num_drafts + 1)}
        capacities = specjax.Capacities(4, 0, 0, 0, 0, logprobs=0)
        start = time.perf_counter()
        engine = specjax.Engine(
            self.target,
            self.proposer(num_drafts),
            tokenizer=self.tokenizer,
            **{"verifier": verifier_of(num_drafts, rate), "capacities": capacities} | sizes | options,
        )
        try:
            with engine:
                self.compile_s = time.perf_counter() - start
                print(f"an engine of {num_slots} slots started in {self.compile_s:.1f} s", file=sys.stderr)
                engine.wait_for_draft_lengths()
                engine.submit([1, 2, 3], SamplingParams(max_tokens=2)).result()  # caches and programs exist now
                yield engine
        finally:
            del engine
            gc.collect()

    @property
    def num_long_slots(self) -> int:
        return min(self.setting.num_slots, 8)

    def long_engine(self):
        """Give an engine for long prompts."""
        return self.engine(self.num_long_slots, self.setting.long + 64, self.setting.num_drafts)

    @contextmanager
    def measured(self, engine: specjax.Engine, row: dict[str, Any]) -> Iterator[None]:
        """Add to a row the compilations of the engine in the block, and pages that are still in use."""
        before = self.compilations.number
        yield
        pages = wait_for_the_end(engine).pages
        row["compilations"] = row.get("compilations", 0) + self.compilations.number - before
        row["pages_used"] = None if pages is None else pages.num_used


def wait_for_the_end(engine: specjax.Engine) -> Stats:
    """Wait until an engine has no more requests, also of those that were cancelled, and return its figures."""
    while (stats := engine.stats()).num_running + stats.num_waiting:
        time.sleep(POLL)
    if not engine.is_running:
        raise RuntimeError("the engine has failed")
    return stats


def verifier_of(num_drafts: int, rate: float | None) -> Any:
    """Return rejection sampling, or a verifier that accepts each draft, after those before it, at a rate."""
    if rate is None:
        return verifiers.rejection
    return Partial(verifiers.synthetic, acceptance_rates=[rate ** (i + 1) for i in range(num_drafts)])


def at_rate(keys: Any, draft: Any, target: Any, *, rate: Any, **options: Any) -> Any:
    """Verify like `verifier_of`, steps with any number of drafts. All rates share a program."""
    if not draft.tokens.shape[1]:
        return verifiers.rejection(keys, draft, target, **options)
    rates = rate ** jax.numpy.arange(1, draft.tokens.shape[1] + 1)
    return verifiers.synthetic(keys, draft, target, acceptance_rates=rates, **options)


def params_of(work: Work, has_text: bool = True) -> SamplingParams:
    lengths = {"max_tokens": work.max_tokens, "ignore_eos": True}
    return SamplingParams(temperature=TEMPERATURE, seed=work.seed, detokenize=has_text, **lengths)


def source_of(preset: str, tokenizer: Any) -> np.ndarray:
    """Return the token ids that prompts are pieces of: held-out Python source, or random ids for random weights."""
    if preset != "embedded":
        return np.random.default_rng(0).integers(1, 4000, 200_000)
    from python_corpus import HELD_OUT

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return np.concatenate([tokenizer.encode((stdlib / f"{name}.py").read_text()).ids for name in HELD_OUT])


def streams(engine: specjax.Engine, has_text: bool) -> Send:
    """Return the function that sends a request of a load as a stream."""

    async def send(work: Work) -> AsyncIterator[dict[str, int] | None]:
        request = engine.submit(work.prompt, params_of(work, has_text))
        async for _ in request:
            yield None
        metrics = request.result().metrics
        yield {name: getattr(metrics, name) for name in COUNTS}

    return send


def run_all(engine: specjax.Engine, works: Sequence[Work]) -> dict[str, float]:
    """Submit all requests at once, wait for them, and return tokens/s: of the whole, and while all slots were active.

    The second is NaN where the engine was full for less than two looks at it.
    """
    looks: list[tuple[float, int, int]] = []
    is_done = threading.Event()

    def look() -> None:
        while not is_done.wait(POLL):
            lengths = [len(job.output.token_ids) for request in requests for job in request._samples.jobs]
            num_done = sum(request.is_done for request in requests)
            looks.append((time.perf_counter(), sum(lengths), sum(map(bool, lengths)) - num_done))

    watcher = threading.Thread(target=look)
    start = time.perf_counter()
    requests = [engine.submit(work.prompt, params_of(work)) for work in works]
    watcher.start()
    num_tokens = sum(request.result().metrics.num_tokens for request in requests)
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    return {"tokens_per_s": num_tokens / seconds, "full_tokens_per_s": full_rate(looks)}


def full_rate(looks: Sequence[tuple[float, int, int]]) -> float:
    """Return tokens/s between the first and the last look at which as many samples as ever had given tokens.

    Args:
        looks: the time, the number of tokens so far, and the number of samples that have some and have not ended, in
            the order of time.
    """
    most = max((running for _, _, running in looks), default=0)
    full = [(when, tokens) for when, tokens, running in looks if running == most]
    if len(full) < 2:
        return math.nan
    (start, first), (end, last) = full[0], full[-1]
    return (last - first) / (end - start)


class Static:
    """Decode requests as static batches, with `specjax.generate`.

    Args:
        bench: the models.
        width: tokens to which prompts are padded.
        max_length: the most tokens of a prompt and its output.
    """

    def __init__(self, bench: Bench, num_drafts: int, rate: float | None, width: int, max_length: int):
        self.target, self.proposer = bench.target, bench.proposer(num_drafts)
        self.verifier, self.width, self.max_length = verifier_of(num_drafts, rate), width, max_length

    def seconds(self, works: Sequence[Work]) -> tuple[float, float]:
        """Return the seconds of the prompts and of the loop."""
        tokens = np.array([work.prompt + [0] * (self.width - len(work.prompt)) for work in works], np.int32)
        lengths = np.array([len(work.prompt) for work in works], np.int32)
        rows = sampling.batch([params_of(work) for work in works])
        key, sizes = jax.random.key(works[0].seed), {"max_length": self.max_length}
        start = time.perf_counter()
        state = jax.block_until_ready(prefill(self.target, self.proposer, tokens, lengths, rows, key, **sizes))
        middle = time.perf_counter()
        state = decode.generate(self.target, self.proposer, state, verifier=self.verifier)
        jax.block_until_ready(state.context.length)
        return middle - start, time.perf_counter() - middle


def loads(bench: Bench, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of closed loops and of Poisson arrivals, by an engine with these options."""
    setting, rate = bench.setting, math.nan
    works = make_works(setting.requests, setting.prompts, setting.outputs, bench.source)
    max_length = setting.prompts[1] + setting.outputs[1]
    with bench.engine(setting.num_slots, max_length, setting.num_drafts, setting.rate, **options) as engine:
        for concurrency in setting.concurrency:
            row: dict[str, Any] = {"load": f"closed loop, {concurrency}"}
            result = loop(bench, engine, works, concurrency, row)
            rate = len(result.traces) / result.seconds
            yield row | figures(result)
        for arrivals in setting.arrivals or (UTILISATION * rate,):
            row = {"load": f"Poisson, {arrivals:.2f} a second"}
            with bench.measured(engine, row):
                result = asyncio.run(poisson(streams(engine, bench.has_text), works, arrivals))
            yield row | figures(result)


def loop(bench: Bench, engine: specjax.Engine, works: Sequence[Work], concurrency: int, row: dict[str, Any]) -> Load:
    """Return the results of a closed loop, with fewer requests where there are fewer streams."""
    setting = bench.setting
    some = works[: max(concurrency * 2, setting.requests * concurrency // setting.concurrency[-1])]
    with bench.measured(engine, row):
        return asyncio.run(closed_loop(streams(engine, bench.has_text), some, concurrency))


def mixed(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows with the seconds of steps, of calls that feed prompts, and of mixed steps."""
    setting = bench.setting
    max_length = setting.prompts[1] + setting.outputs[1]
    with bench.engine(setting.num_slots, max_length, setting.num_drafts, setting.rate) as engine:
        device = engine._scheduler._device
        for num_slots, num_tokens in device.mixed_sizes:
            active = list(range(num_slots - 1))  # the last slot gets the prompt
            tokens = np.arange(num_tokens, dtype=np.int32)
            given = [num_slots - 1], [chunk_at(tokens, 0, num_tokens, device.no_features)]
            filled = device.rows_of([*active, num_slots - 1])
            use = MIXED_USE if filled is None else Needs.EVERYTHING
            calls = {
                "step_s": lambda use=use, filled=filled: device.step(use, rows=filled).tokens,
                "prompts_s": lambda given=given, size=num_tokens: device.prefill(*given, *device.tiles_of(size))[0],
                "mixed_s": lambda size=(num_slots, num_tokens), slots=active, given=given: (
                    device.mixed_step(size, slots, *given)[0].tokens
                ),
            }
            length, count = max_length // 2, min(8, max_length // 8 // (setting.num_drafts + 1))
            with occupied(device, active, length, max_length - length):
                runs = [{name: seconds_of(call, count) for name, call in calls.items()} for _ in range(REPEATS)]
            yield {"slots": num_slots, "tokens": num_tokens, "num_drafts": setting.num_drafts} | medians(runs)


def seconds_of(call: Callable[[], Any], count: int) -> float:
    """Return the seconds of a call, of `count` that follow each other."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    results = [call() for _ in range(count)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / count


def sizes(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows of closed loops of few streams, by an engine of many slots and by one of as many slots as streams."""
    setting = bench.setting
    max_length = setting.prompts[1] + setting.outputs[1]
    works = make_works(setting.requests, setting.prompts, setting.outputs, bench.source)
    rows: list[dict[str, Any]] = [{"streams": n, "slots": setting.num_slots} for n in setting.concurrency[:-1]]
    for number in (setting.num_slots, *(row["streams"] for row in rows)):
        with bench.engine(number, max_length, setting.num_drafts, setting.rate) as engine:
            for row in rows:
                name = "tokens_per_s" if number == setting.num_slots else "own_tokens_per_s"
                if number in (setting.num_slots, row["streams"]):
                    speeds = (figures(loop(bench, engine, works, row["streams"], row)) for _ in range(REPEATS))
                    row[name] = statistics.median(each["tokens_per_s"] for each in speeds)
    yield from rows


def full(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows with the speed of full batches of equal lengths, and the speed of `specjax.generate`."""
    prompt, output = bench.setting.full_lengths
    for num_slots, num_drafts, rate in bench.setting.full:
        works = make_works(num_slots, (prompt, prompt), (output, output), bench.source)
        row: dict[str, Any] = {"slots": num_slots, "num_drafts": num_drafts, "rate": rate}
        batch = Static(bench, num_drafts, rate, prompt, prompt + output)
        batch.seconds(works)  # compiles
        runs, num_tokens = [], num_slots * output
        with bench.engine(num_slots, prompt + output, num_drafts, rate) as engine:
            row["compile_s"] = bench.compile_s
            for _ in range(REPEATS):  # in turns, so that both see the same of what else the machine does
                with bench.measured(engine, row):
                    runs.append(run_all(engine, works))
                feeding, looping = batch.seconds(works)
                runs[-1] |= {"generate_tokens_per_s": num_tokens / (feeding + looping)}
                runs[-1] |= {"loop_tokens_per_s": num_tokens / looping}
        yield row | medians(runs)


def static(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row with the speed of mixed lengths, and the speed of static batches."""
    setting = bench.setting
    size, max_length = setting.num_slots, setting.prompts[1] + setting.outputs[1]
    number = max(size, 4 * setting.requests // size * size)  # long enough for its end to count little
    works = make_works(number, setting.prompts, setting.outputs, bench.source, seed=1)
    num_tokens = sum(work.max_tokens for work in works)
    row: dict[str, Any] = {"slots": size, "requests": number}
    batch = Static(bench, setting.num_drafts, None, setting.prompts[1], max_length)
    batch.seconds(works[:size])  # compiles
    runs = []
    with bench.engine(size, max_length, setting.num_drafts) as engine:
        for _ in range(REPEATS):
            with bench.measured(engine, row):
                runs.append(run_all(engine, works))
            seconds = sum(sum(batch.seconds(works[i : i + size])) for i in range(0, number, size))
            runs[-1] |= {"static_tokens_per_s": num_tokens / seconds}
    yield row | medians(runs)


class Counted:
    """A choice of K that counts the steps of each K.

    Args:
        choice: the choice.

    Attributes:
        steps: the number of steps of each K.
    """

    def __init__(self, choice: Any):
        self._choice, self.steps = choice, Counter()

    def choose(self, num_running: int, num_behind: int) -> int:
        num_drafts = self._choice.choose(num_running, num_behind)
        self.steps[num_drafts] += 1
        return num_drafts

    def count(self, *counts: Any) -> None:
        self._choice.count(*counts)


def auto(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows with the speed of an engine that chooses K, of one with a fixed K, and of one without a drafter."""
    (prompt, output), most = bench.setting.auto_lengths, bench.setting.num_drafts
    if not bench.setting.auto:
        return
    num_slots = max(number for number, _ in bench.setting.auto)
    options = auto_options(bench, num_slots)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"num_drafts": 0},
        "fixed": {"num_drafts": most},
        "auto": {"num_drafts": most, "draft_lengths": range(most + 1)},
    }
    rows = [({"streams": number, "rate": rate}, [{} for _ in range(REPEATS)]) for number, rate in bench.setting.auto]
    for names in [tuple(kinds)] if num_slots <= IN_TURNS else [(name,) for name in kinds]:
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(bench.engine(num_slots, prompt + output, **kinds[name], **options))
                for name in names
            }
            choice = engines["auto"]._scheduler._draft_length if "auto" in engines else None
            if choice is not None:
                print(f"seconds of steps: {choice.times.seconds}", file=sys.stderr)
            for row, runs in rows:
                for engine in engines.values():
                    engine._scheduler._device.verifier = as_pytree(Partial(at_rate, rate=row["rate"]))
                counted = Counted(deepcopy(choice))  # which knows nothing of other rates
                if choice is not None:
                    engines["auto"]._scheduler._draft_length = counted
                for seed, run in enumerate(runs):
                    works = make_works(row["streams"], (prompt, prompt), (output, output), bench.source, seed=seed)
                    for name, engine in engines.items():
                        with bench.measured(engine, row):
                            speeds = run_all(engine, works)
                        run |= {f"{name}_{key}": speed for key, speed in speeds.items()}
                        print(row | {"engine": name} | speeds, file=sys.stderr)
                if choice is not None:
                    for run in runs:
                        run |= against_the_better(run)
                    yield row | medians(runs) | {"steps": dict(sorted(counted.steps.items()))}


def against_the_better(run: dict[str, float]) -> dict[str, float]:
    """Return the ratios of the speeds of the engine that chooses K to the speeds of the better one of the others."""
    keys = {"ratio": "tokens_per_s", "full_ratio": "full_tokens_per_s"}
    return {name: run[f"auto_{key}"] / max(run[f"plain_{key}"], run[f"fixed_{key}"]) for name, key in keys.items()}


def auto_options(bench: Bench, num_slots: int) -> dict[str, Any]:
    """Return options of the engines of `auto`, which leave out programs that its requests do not need."""
    (prompt, output), defaults = bench.setting.auto_lengths, default_sizes("server")
    sizes = {*defaults.step_sizes, *(number for number, _ in bench.setting.auto)}
    chunk = min(prompt, defaults.chunk)
    params = params_of(Work([], output, 0))
    return {
        "rate": None,
        "verifier": Partial(at_rate, rate=0.5),
        "step_sizes": sorted(size for size in sizes if size < num_slots),
        "prompt_sizes": [size for size in defaults.prompts if chunk <= size <= max(chunk * num_slots, defaults.chunk)],
        "warm_up": [params, replace(params, presence_penalty=0.1)],
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure of some runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def entering(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row with the times between pieces of streams while a long prompt enters."""
    setting = bench.setting
    long = make_works(2, (setting.long, setting.long), (4, 4), bench.source, seed=2)
    others = make_works(bench.num_long_slots - 1, (16, 16), (setting.long, setting.long), bench.source, seed=3)
    row: dict[str, Any] = {"running": len(others), "long": setting.long}
    with bench.long_engine() as engine, bench.measured(engine, row):
        alone = engine.submit(long[0].prompt, params_of(long[0])).result().metrics.time_to_first_token
        before, during, waited = asyncio.run(_enter(engine, others, long[1], bench.has_text))
    num_chunks = -(-setting.long // chunk_size())
    yield row | {
        "step_s": statistics.median(before),
        "chunk_s": alone / num_chunks,
        "between_arrivals_s": spread(during),
        "longest_s": max(during, default=math.nan),
        "first_token_s": waited,
    }


async def _enter(
    engine: specjax.Engine, others: Sequence[Work], work: Work, has_text: bool
) -> tuple[list[float], list[float], float]:
    """Run requests, then one more; return the others' gaps before and meanwhile, and its time to the first token."""
    requests = [engine.submit(other.prompt, params_of(other, has_text)) for other in others]
    traces: list[list[float]] = [[] for _ in others]

    async def follow(request: Any, times: list[float]) -> None:
        with suppress(CancelledError):
            async for _ in request:
                times.append(time.perf_counter())

    tasks = [asyncio.create_task(follow(*pair)) for pair in zip(requests, traces, strict=True)]
    while min(map(len, traces)) < 64:
        await asyncio.sleep(0.01)
    start = time.perf_counter()
    async for _ in engine.submit(work.prompt, params_of(work, has_text)):
        break
    end = time.perf_counter()
    for request in requests:
        request.cancel()
    await asyncio.gather(*tasks)
    before = [gap for times in traces for gap in gaps([t for t in times[16:] if t < start])]
    during = [gap for times in traces for gap in gaps([t for t in times if start <= t <= end])]
    return before, during, end - start


def shared(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row with the time to the first token of long prompts that share nothing, or most."""
    setting, waits = bench.setting, {}
    lengths = (setting.long, setting.long), (2, 2)
    row: dict[str, Any] = {"long": setting.long}
    with bench.long_engine() as engine, bench.measured(engine, row):
        for name, share in (("unshared_s", 0.0), ("shared_s", SHARED)):
            works = make_works(PROMPTS + 1, *lengths, bench.source, shared=share, seed=4)
            results = [engine.submit(work.prompt, params_of(work)).result() for work in works]
            waits[name] = statistics.median(result.metrics.time_to_first_token for result in results[1:])
            waits["num_cached_tokens"] = results[-1].num_cached_tokens
    yield row | waits


def gap(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows with the share of the time in which the device waits between two operations."""
    if jax.default_backend() != "gpu":
        return
    prompt, output = bench.setting.full_lengths
    for num_slots, num_drafts, rate in bench.setting.full[:3]:
        row: dict[str, Any] = {"slots": num_slots, "num_drafts": num_drafts}
        works = make_works(2 * num_slots, (prompt, prompt), (output, output), bench.source)
        with bench.engine(num_slots, prompt + output, num_drafts, rate) as engine, bench.measured(engine, row):
            requests = [engine.submit(work.prompt, params_of(work)) for work in works]
            while engine.stats().num_tokens < 8 * num_slots:
                time.sleep(POLL)
            with profiled() as events:
                time.sleep(0.5)
                for request in requests:
                    request.cancel()
                wait_for_the_end(engine)  # the profiler may not stop while the device works
            row |= waits_of_device(events)
        yield row


def kernels(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield rows with the launches of all that an engine asks of the device."""
    if jax.default_backend() != "gpu":
        return
    setting, chunk = bench.setting, chunk_size()
    max_length = setting.prompts[1] + setting.outputs[1]
    with bench.engine(setting.num_slots, max_length, setting.num_drafts, setting.rate) as engine:
        device = engine._scheduler._device
        most = device.num_slots - 1  # the last slot gets the prompt
        tokens = np.arange(min(chunk, max_length), dtype=np.int32)
        given = [most], [chunk_at(tokens, 0, chunk, device.no_features)]

        def step(number: int) -> jax.Array:
            rows = device.rows_of(list(range(number)))
            return device.step(MIXED_USE if rows is None else Needs.EVERYTHING, rows=rows).tokens

        calls: dict[str, Callable[[], Any]] = {f"{n} slots": partial(step, min(n, most)) for n in device.step_sizes}
        calls[f"{chunk} tokens"] = lambda: device.prefill(*given, *device.tiles_of(chunk))[0]
        if (device.num_slots, chunk) in device.mixed_sizes:
            mixed = (device.num_slots, chunk), list(range(most)), *given
            calls[f"{device.num_slots} slots and {chunk} tokens"] = lambda: device.mixed_step(*mixed)[0].tokens
        params = neutral(device.capacities)._replace(max_tokens=np.int32(8))
        one = slot_rows.request(device.state, tokens, np.zeros(2, np.uint32), params)

        def enter_and_leave() -> Any:
            device.insert(most, one)
            device.evict([most])
            return device.state.context.length + 0  # the next one donates the state

        calls["a request enters and leaves"] = enter_and_leave
        length = max_length // 2
        for name, call in calls.items():
            with occupied(device, list(range(most)), length, max_length - length):
                seconds_of(call, 2)
                with profiled() as events:
                    jax.block_until_ready([call() for _ in range(PROFILED)])
            for kernel, spans in largest(events):
                each = statistics.mean(spans)
                row = {"call": name, "num_drafts": setting.num_drafts, "kernel": kernel}
                yield row | {"launches": len(spans) / PROFILED, "each_s": each, "all_s": each * len(spans) / PROFILED}


def chunk_size() -> int:
    """Return the number of tokens of a chunk of a prompt."""
    return default_sizes("server").chunk


def full_row(row: dict[str, Any]) -> str:
    drafts = row["num_drafts"] if row["rate"] is None else f"{row['num_drafts']}, accepted at {row['rate']}"
    names = "full_tokens_per_s", "loop_tokens_per_s", "tokens_per_s", "generate_tokens_per_s"
    inside, loop, whole, generate = (row[name] for name in names)
    speeds = [f"{inside:.0f}", f"{loop:.0f}", f"{inside / loop:.2f}", f"{whole:.0f}", f"{generate:.0f}"]
    return table_row(
        [row["slots"], drafts, *speeds, f"{whole / generate:.2f}", f"{row['compile_s']:.0f}", *checks(row)]
    )


def sizes_row(row: dict[str, Any]) -> str:
    own, whole = row["own_tokens_per_s"], row["tokens_per_s"]
    return table_row([row["streams"], row["slots"], f"{whole:.0f}", f"{own:.0f}", f"{whole / own:.2f}", *checks(row)])


def mixed_row(row: dict[str, Any]) -> str:
    times = [row[name] for name in ("step_s", "prompts_s", "mixed_s")]
    shown = [f"{1e3 * seconds:.2f}" for seconds in times]
    return table_row([row["slots"], row["num_drafts"], row["tokens"], *shown, f"{sum(times[:2]) / times[2]:.2f}"])


def static_row(row: dict[str, Any]) -> str:
    ours, theirs = row["tokens_per_s"], row["static_tokens_per_s"]
    return table_row(
        [row["slots"], row["requests"], f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}", *checks(row)]
    )


def auto_row(row: dict[str, Any]) -> str:
    speeds = [f"{row[f'{name}_tokens_per_s']:.0f}" for name in ("plain", "fixed", "auto")]
    ratios = [f"{row[name]:.2f}" for name in ("ratio", "full_ratio")]
    num_steps = sum(row["steps"].values())
    shares = ", ".join(f"{k}: {100 * number / num_steps:.1f}" for k, number in row["steps"].items())
    return table_row([row["streams"], row["rate"], *speeds, *ratios, shares, *checks(row)])


def entering_row(row: dict[str, Any]) -> str:
    between = row["between_arrivals_s"]
    names = row["step_s"], row["chunk_s"], between["p50"], between["p99"], row["longest_s"], row["first_token_s"]
    return table_row([row["long"], row["running"], *(f"{1e3 * seconds:.1f}" for seconds in names), *checks(row)])


def shared_row(row: dict[str, Any]) -> str:
    one, other = row["unshared_s"], row["shared_s"]
    times = [f"{1e3 * one:.1f}", f"{1e3 * other:.1f}", f"{other / one:.2f}"]
    return table_row([row["long"], row["num_cached_tokens"], *times, *checks(row)])


def kernels_row(row: dict[str, Any]) -> str:
    times = f"{row['launches']:.0f}", f"{1e6 * row['each_s']:.1f}", f"{1e3 * row['all_s']:.3f}"
    return table_row([row["call"], row["num_drafts"], row["kernel"], *times])


def gap_row(row: dict[str, Any]) -> str:
    shares = [f"{100 * row[name]:.1f}" for name in ("host_gap", "idle")]
    return table_row([row["slots"], row["num_drafts"], *shares, *checks(row)])


def checks(row: dict[str, Any]) -> list[Any]:
    return [row["compilations"], row["pages_used"]]


CHECKS = ("compilations", "pages in use after")
PARTS: dict[str, tuple[Callable[[Bench], Iterator[dict[str, Any]]], Sequence[str], Callable[[dict[str, Any]], str]]] = {
    "loads": (loads, COLUMNS, load_row),
    "apart": (partial(loads, mixed_sizes=()), COLUMNS, load_row),
    "mixed": (mixed, ("slots", "K", "tokens of prompts", "ms: step", "prompts", "mixed", "ratio"), mixed_row),
    "sizes": (
        sizes,
        ("streams", "slots", "tokens/s", "an engine of as many slots as streams", "ratio", *CHECKS),
        sizes_row,
    ),
    "full": (
        full,
        (
            "slots",
            "K",
            "tokens/s, all slots active",
            "loop of generate",
            "ratio",
            "with prompts",
            "generate with prompts",
            "ratio",
            "compile, s",
            *CHECKS,
        ),
        full_row,
    ),
    "static": (static, ("slots", "requests", "tokens/s", "static batches", "ratio", *CHECKS), static_row),
    "auto": (
        auto,
        (
            "streams",
            "accepted at",
            "tokens/s: no drafter",
            "largest K",
            "chosen K",
            "against the better",
            "while all streams run",
            "% of the steps of each K",
            *CHECKS,
        ),
        auto_row,
    ),
    "entering": (
        entering,
        (
            "tokens that enter",
            "running",
            "ms: step",
            "chunk",
            "between pieces meanwhile, p50",
            "p99",
            "longest",
            "first token",
            *CHECKS,
        ),
        entering_row,
    ),
    "shared": (shared, ("tokens", "found", "ms to first token: unshared", "shared", "ratio", *CHECKS), shared_row),
    "kernels": (kernels, ("call", "K", "kernel", "launches", "us each", "ms a call"), kernels_row),
    "gap": (gap, ("slots", "K", "% of the time: waits for the host", "idle", *CHECKS), gap_row),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(SETTINGS), default="embedded")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--requests", type=int, help="requests of a load; default: those of the preset")
    parser.add_argument("--arrivals", type=float, nargs="+", default=[], help="Poisson arrivals a second, for loads")
    parser.add_argument("--slots", type=int, help="slots for loads, and streams of their one closed loop")
    parser.add_argument("--streams", type=int, nargs="+", default=[], help="numbers of streams, for auto")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    bench = Bench(args.preset, args.requests, args.slots, tuple(args.arrivals), tuple(args.streams))
    device = jax.devices()[0]
    print(f"device {device.device_kind}, jax {jax.__version__}, {args.preset}.")
    rows = []
    for part in args.parts:
        measure, columns, show = PARTS[part]
        print(f"\n{part}\n\n{header(columns)}")
        for row in measure(bench):
            rows.append({"part": part} | row)
            print(show(row))
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "preset": args.preset}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
