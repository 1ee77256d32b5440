"""Loads for benchmarks of servers and engines: requests of mixed lengths, their arrivals, and what clients see.

A load is sent by a function `send(work)`, which yields None as tokens of the answer come, and last, if it knows, their
counts: `num_tokens`, `num_drafted` and `num_accepted`. Times are in seconds.
"""

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

SAME_ARRIVAL = 2e-4  # seconds between tokens that came together: a step may commit several
COLUMNS = (
    "load",
    "requests",
    "tokens/s",
    "requests/s",
    "first token, ms: mean",
    "p50",
    "p99",
    "between pieces, ms: mean",
    "p50",
    "p99",
    "ms a token",
    "acceptance",
    "compilations",
    "pages in use after",
)


COUNTS = ("num_tokens", "num_drafted", "num_accepted")


class Work(NamedTuple):
    """One request of a load."""

    prompt: list[int]  # token ids
    max_tokens: int  # all of which it generates
    seed: int


class Trace(NamedTuple):
    """Times and tokens of one request, as its client saw them."""

    start: float
    times: list[float]  # when tokens came
    counts: dict[str, int]  # num_tokens; num_drafted and num_accepted where they are known


class Bounds(NamedTuple):
    """The most seconds that a client waits: for the first token, for a token after it on average, and for the end."""

    first_token: float = math.inf
    per_token: float = math.inf
    whole: float = math.inf

    def hold(self, trace: Trace) -> bool:
        """Return whether a request was answered within them."""
        if not trace.times:
            return False
        number = trace.counts["num_tokens"] - 1
        waits = trace.times[0] - trace.start, trace.times[-1] - trace.times[0], trace.times[-1] - trace.start
        return waits[0] <= self.first_token and waits[1] <= self.per_token * max(number, 1) and waits[2] <= self.whole


class Load(NamedTuple):
    """Results of the clients of a load, and the duration of the load."""

    traces: list[Trace]
    seconds: float


Send = Callable[[Work], AsyncIterator[dict[str, int] | None]]


def make_works(
    number: int,
    prompt_lengths: tuple[int, int],
    output_lengths: tuple[int, int],
    source: np.ndarray,
    *,
    shared: float = 0.0,
    seed: int = 0,
) -> list[Work]:
    """Return requests whose prompts are pieces of a long text.

    Args:
        number: how many.
        prompt_lengths: the smallest and the largest number of tokens of a prompt.
        output_lengths: the same of an answer.
        source: token ids of the text.
        shared: the share of each prompt, its beginning, that all prompts have in common.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    common = source[random.integers(len(source) - prompt_lengths[1]) :]
    works = []
    for i in range(number):
        length = random.integers(*prompt_lengths, endpoint=True)
        num_shared, start = round(shared * length), random.integers(len(source) - length)
        prompt = np.concatenate([common[:num_shared], source[start : start + length - num_shared]])
        max_tokens = random.integers(*output_lengths, endpoint=True)
        works.append(Work(prompt.tolist(), int(max_tokens), 1000 * seed + i))
    return works


async def closed_loop(send: Send, works: Sequence[Work], concurrency: int) -> Load:
    """Send requests with so many under way at a time: the next one starts when one ends."""
    waiting = iter(works)

    async def client() -> list[Trace]:
        return [await _trace(send, work) for work in waiting]

    return await _timed([client() for _ in range(concurrency)])


async def poisson(send: Send, works: Sequence[Work], rate: float, seed: int = 0) -> Load:
    """Send requests at random times, `rate` of them a second on average, whatever has become of those before."""
    starts = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(works))).tolist()

    async def client(work: Work, start: float) -> list[Trace]:
        await asyncio.sleep(start)
        return [await _trace(send, work)]

    return await _timed([client(*pair) for pair in zip(works, starts, strict=True)])


async def _timed(clients: Sequence[Coroutine[Any, Any, list[Trace]]]) -> Load:
    start = time.perf_counter()
    traces = [trace for traces in await asyncio.gather(*clients) for trace in traces]
    return Load(traces, time.perf_counter() - start)


async def _trace(send: Send, work: Work) -> Trace:
    start, times, counts = time.perf_counter(), [], {}
    async for known in send(work):
        if known is None:
            times.append(time.perf_counter())
        else:
            counts = known
    return Trace(start, times, {"num_tokens": len(times)} | counts)


def gaps(times: Sequence[float]) -> list[float]:
    """Return the seconds between the pieces of a stream; tokens that came together are one piece."""
    differences = np.diff(times)
    return differences[differences > SAME_ARRIVAL].tolist()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50 and p99 of values, NaN of none."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p99"), float("nan"))
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"mean": statistics.fmean(values), "p50": p50, "p99": p99}


def figures(load: Load, bounds: Bounds | None = None) -> dict[str, Any]:
    """Return the throughput of a load, the spread of what its clients waited for, and with bounds the goodput.

    The goodput is the number of requests a second that are answered within the bounds.
    """
    answered = [trace for trace in load.traces if trace.times]
    counts = {name: sum(trace.counts.get(name, 0) for trace in answered) for name in COUNTS}
    several = [(trace.times[-1] - trace.times[0], trace.counts["num_tokens"] - 1) for trace in answered]
    return {
        "requests": len(load.traces),
        "seconds": load.seconds,
        "tokens_per_s": counts["num_tokens"] / load.seconds,
        "requests_per_s": len(load.traces) / load.seconds,
        "first_token_s": spread([trace.times[0] - trace.start for trace in answered]),
        "between_arrivals_s": spread([gap for trace in answered for gap in gaps(trace.times)]),
        "per_token_s": spread([seconds / number for seconds, number in several if number > 0]),
        "whole_s": spread([trace.times[-1] - trace.start for trace in answered]),
        "acceptance": counts["num_accepted"] / counts["num_drafted"] if counts["num_drafted"] else None,
    } | ({} if bounds is None else {"goodput": sum(map(bounds.hold, load.traces)) / load.seconds})


def header(columns: Sequence[str] = COLUMNS) -> str:
    """Return the header of a table."""
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def table_row(cells: Sequence[Any]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def load_row(row: dict[str, Any]) -> str:
    """Return the row of a load, which may lack what only an engine knows."""
    cells = [row["load"], row["requests"], f"{row['tokens_per_s']:.0f}", f"{row['requests_per_s']:.2f}"]
    for name in ("first_token_s", "between_arrivals_s"):
        cells += [f"{1e3 * row[name][part]:.1f}" for part in ("mean", "p50", "p99")]
    cells.append(f"{1e3 * row['per_token_s']['mean']:.2f}")
    acceptance = row["acceptance"]
    cells.append("-" if acceptance is None else f"{acceptance:.3f}")
    cells += [row.get("compilations", "-"), row.get("pages_used", "-")]
    return table_row([*cells, f"{row['goodput']:.2f}"] if "goodput" in row else cells)
