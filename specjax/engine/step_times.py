"""The seconds of an engine's steps, measured once for a kind of device, a model and a version, and kept in a file.

They are the seconds of whole rounds of a scheduler, with the host's work: a small model may wait for the host.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from specjax.decoding.binding import name_of
from specjax.engine import compilation_cache
from specjax.engine.draft_length import ByFunction
from specjax.engine.jobs import Job
from specjax.engine.requests import Samples
from specjax.engine.scheduler import Scheduler
from specjax.engine.slot_rows import request
from specjax.engine.slots import Slots
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Needs, neutral
from specjax.theory import StepTimes
from specjax.types import PyTree
from specjax.version import __version__

CONTEXT = 256  # tokens of a sequence before the steps that are measured, where there is room
STEPS, REPEATS = 6, 3  # rounds that are measured at a time, and how often, in turn; the fastest counts

logger = logging.getLogger(__name__)
_known: dict[str, StepTimes] = {}  # of this process, by the name of the file


def as_step_times(given: StepTimes | str | Path | None) -> StepTimes | None:
    """Return the argument `step_times` of `LLM` and `Engine`, read from its file where it is one.

    Raises:
        ValueError: it has a wrong type, or the file is none that `specjax tune` has written.
        OSError: the file cannot be read.
    """
    if given is None or isinstance(given, StepTimes):
        return given
    if not isinstance(given, str | Path):
        raise ValueError(f"step_times must be a theory.StepTimes or the path of a file, got {given!r}")
    return StepTimes.load(given)


def step_times_of(device: Slots, sizes: Sequence[int], use: int = Needs.EVERYTHING) -> StepTimes:
    """Return the seconds of the steps of a device whose slots are all vacant, for each of its K.

    They are read from a file in the folder of compiled programs. Where there is none they are measured, and written.

    Args:
        device: the device.
        sizes: the sizes of steps that will be taken, of `device.step_sizes`.
        use: the sampling features that measured steps of all slots compute, as `Slots.step` takes it.
    """
    times = known_step_times(device, sizes, use)
    if times is None:
        start = time.perf_counter()
        times = measure(device, sizes, use)
        keep_step_times(device, sizes, use, times, time.perf_counter() - start)
    return times


def known_step_times(device: Slots, sizes: Sequence[int], use: int = Needs.EVERYTHING) -> StepTimes | None:
    """Return the seconds that `step_times_of` returns if nobody has to measure them, and else None."""
    name = _name_of(device, sizes, use)
    path = _path_of(name)
    if name not in _known and path is not None and path.exists():
        try:
            _known[name] = StepTimes.load(path)
        except (OSError, ValueError) as error:
            logger.warning("the seconds of steps are measured anew: %s", error)
    return _known.get(name)


def keep_step_times(device: Slots, sizes: Sequence[int], use: int, times: StepTimes, seconds: float) -> None:
    """Let `step_times_of` return a table from now on, in later processes too, and log the seconds that it took."""
    name = _name_of(device, sizes, use)
    path, _known[name] = _path_of(name), times
    kept = "not kept" if path is None else _keep(times, path)
    logger.info("measured the seconds of steps in %.1f s, %s", seconds, kept)


def measure(device: Slots, sizes: Sequence[int], use: int = Needs.EVERYTHING) -> StepTimes:
    """Measure the steps of some sizes of a device whose slots are all vacant, for each of its K."""
    return Measurement(device, sizes, use, device.draft_lengths).complete()


def interpolated(times: StepTimes, draft_lengths: Sequence[int]) -> StepTimes:
    """Return the seconds of each K, where some are measured and others assumed to lie on lines between these."""
    table = {}
    for size, seconds in times.seconds.items():
        known = sorted(seconds)
        found = np.interp(draft_lengths, known, [seconds[k] for k in known])
        table[size] = dict(zip(draft_lengths, found.tolist(), strict=True))
    return StepTimes(table)


class Measurement:
    """A measurement in parts of the steps of a device, whose slots are all vacant during each part.

    Args:
        device, sizes, use: as `step_times_of` takes them.
        draft_lengths: the K that are measured.

    Attributes:
        use: the features.
        times: the seconds of steps; None until the measurement is complete.
        seconds: how long the parts have taken.
    """

    def __init__(self, device: Slots, sizes: Sequence[int], use: int, draft_lengths: Collection[int]):
        self._device, self.use = device, use
        self._found: dict[int, dict[int, float]] = {size: dict.fromkeys(draft_lengths, math.inf) for size in sizes}
        self._left = deque(itertools.product(range(REPEATS), sizes, draft_lengths))
        self.times: StepTimes | None = None
        self.seconds = 0.0

    def advance(self, pages: Sequence[int] | None = None, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Measure the next part.

        Args:
            pages: as `occupied` takes them.
            goes_on: is asked before each round; where it returns False, the part ends and is measured anew next time.
        """
        start = time.perf_counter()
        _, size, k = self._left[0]
        seconds = _seconds(self._device, size, k, self.use, pages, goes_on)
        if seconds is not None:
            self._left.popleft()
            self._found[size][k] = min(self._found[size][k], seconds)
        self.seconds += time.perf_counter() - start
        if not self._left:
            self.times = StepTimes(self._found)

    def complete(self) -> StepTimes:
        """Measure all parts that are left, and return the seconds."""
        while self.times is None:
            self.advance()
        return self.times


def _seconds(
    device: Slots,
    size: int,
    num_draft_tokens: int,
    use: int,
    pages: Sequence[int] | None,
    goes_on: Callable[[], bool],
) -> float | None:
    """Return the seconds of a scheduler's round whose step has K drafts of `size` sequences.

    A round dispatches a step and reads the one before, so the host's work counts where it does not fit beside a step.
    The result is None where `goes_on` returns False before a round.
    """
    length = max(min(CONTEXT, device.max_length // 2), 1)
    count = max(min(STEPS, (device.max_length - length) // (num_draft_tokens + 1) - 2), 1)
    scheduler = _Endless(device, None, 1, draft_length=ByFunction(lambda *_: num_draft_tokens))

    def rounds(count: int) -> float | None:
        start = time.perf_counter()
        for _ in range(count):
            if not goes_on():
                return None
            scheduler.advance()
            for job in scheduler.changed:
                job.owner.update(start)
        return (time.perf_counter() - start) / count

    with occupied(device, range(size), length, (count + 2) * (num_draft_tokens + 1), pages):
        for slot in range(size):
            scheduler.take_over(_job(device, use), slot)
        rounds(2)  # compile, feed a drafter that has been left behind, and leave a step to be read
        return rounds(count)


class _Endless(Scheduler):
    """A scheduler whose jobs keep their slots when they end, so that its steps have all of them."""

    def _leave(self, job: Job) -> None:
        pass


def _job(device: Slots, use: int) -> Job:
    """Return a job without text, for a slot that decodes already, whose steps compute the features `use`."""
    tokenizer: Any = SimpleNamespace(decode=lambda *_: "")
    params, row = SamplingParams(detokenize=False), neutral(device.capacities)
    samples = Samples("", [0], params, row, np.zeros(2, np.uint32), tokenizer)
    (job,) = samples.jobs
    job.owner, job.use = samples, Needs(use)
    return job


@contextmanager
def occupied(
    device: Slots, slots: Sequence[int], length: int, num_tokens: int, pages: Sequence[int] | None = None
) -> Iterator[None]:
    """Let sequences of `length` tokens have slots of a device in a block, which may give each `num_tokens` more.

    All slots are vacant before and after it, and have pages for so many tokens in it, whose caches hold anything. They
    are some of `pages`, and where these are too few, several slots have the same; None is all pages of the pool.
    """
    tokens = np.random.default_rng(0).integers(0, device.model.vocab_size, length, np.int32)
    sampling = neutral(device.capacities)._replace(max_tokens=np.int32(device.max_length))
    table = _table(device, length + num_tokens, pages)
    if table is not None:
        device.set_pages(table)
    for slot in slots:
        key_data = np.array([0, slot], np.uint32)
        device.insert(slot, request(device.state, tokens, key_data, sampling))
    yield
    device.evict(slots)


def _table(device: Slots, length: int, pages: Sequence[int] | None) -> np.ndarray | None:
    """Return a page table in which each row has `length` tokens, no page twice where there are enough.

    It is None where caches are not in pages, or hold nothing.
    """
    known = device.state.context.pages
    if known is None or not (pools := jax.tree.leaves(device.state.cache.pools)):
        return None
    num_pages, page_size, *_ = pools[0].shape
    usable = np.arange(num_pages) if pages is None else np.asarray(pages)
    table = np.full(known.shape, num_pages, np.int32)
    used = min(-(-length // page_size), table.shape[1])
    table[:, :used] = usable[np.arange(table.shape[0] * used).reshape(table.shape[0], used) % len(usable)]
    return table


def _name_of(device: Slots, sizes: Sequence[int], use: int) -> str:
    """Return the name of the file for a device: its kind, the sizes of the models and of the steps, and versions."""
    about = {
        "versions": [__version__, jax.__version__],
        "device": [jax.devices()[0].device_kind, len(_devices_of(device.model.params))],
        "model": _shapes_of(device.model.params),
        "drafter": [type(device.proposer).__name__, _shapes_of(device.proposer)],
        "verifier": [name_of(device.verifier.func), _shapes_of(device.verifier)],
        "rounds": [list(sizes), device.draft_lengths, int(use)],
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"specjax-step-times-{digest[:24]}.json"


def _path_of(name: str) -> Path | None:
    """Return the path of a file in the folder of compiled programs; None without such a folder."""
    folder = compilation_cache.used_folder()
    return Path(folder) / name if folder is not None and Path(folder).is_dir() else None


def _shapes_of(tree: PyTree) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {jax.typeof(leaf).str_short()}" for path, leaf in leaves]


def _devices_of(tree: PyTree) -> set[Any]:
    return {d for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for d in leaf.sharding.device_set}


def _keep(times: StepTimes, path: Path) -> str:
    """Write seconds that were measured to a file, all at once, and return how, for the log."""
    about = {"specjax": __version__, "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as folder:
            times.save(Path(folder) / path.name, **about)
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {path}"
