"""Say in the log of Python, by loggers below "specjax", on which devices models run and which programs are compiled."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
from jax import monitoring

from specjax.engine.compilation_cache import used_folder
from specjax.types import Model, Proposer, PyTree

if TYPE_CHECKING:
    from specjax.engine.slots import Slots

COMPILED = "/jax/core/compile/backend_compile_duration"  # which JAX also records for a program that it reads
READ = "/jax/compilation_cache/cache_retrieval_time_sec"

logger = logging.getLogger(__name__)


def log_models(model: Model, proposer: Proposer) -> None:
    """Log the devices of a target, and the dtypes and bytes of the weights of target and proposer."""
    size, dtypes = _size(model.params), _dtypes(model.params)
    logger.info("target: %s of weights, %s, on %s", size, dtypes, _devices(model))
    if not proposer.num_draft_tokens:
        logger.info("no drafts: plain decoding")
        return
    name, weights = type(proposer).__name__, ""
    if _arrays(proposer):
        weights = f", {_size(proposer)} of weights, {_dtypes(proposer)}"
    logger.info("drafts: %d tokens a step, %s%s", proposer.num_draft_tokens, name, weights)


def log_first_call(model: Model, proposer: Proposer) -> None:
    """Log devices and dtypes of the first call of an `LLM`, its programs, and the folder that may have them."""
    programs = f"the programs of prompts and of steps with {proposer.num_draft_tokens} draft tokens"
    folder = used_folder()
    kept = "and keeps them for this process alone" if folder is None else f"unless {folder} has them"
    given = _devices(model), _dtypes(model.params), programs, kept
    logger.info("first call: on %s, weights of %s; it compiles %s, %s", *given)


def _devices(model: Model) -> str:
    """Return the number and the kind of the devices of a model."""
    devices = {device for leaf in _arrays(model.params) for device in leaf.devices()} or {jax.devices()[0]}
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(Counter(d.device_kind for d in devices).items()))


def log_caches(slots: "Slots", pool: tuple[int, int] | None) -> None:
    """Log the bytes of the caches of target and proposer, and the number and size of the pages in the pool."""
    pages = "" if pool is None else f" in {pool[0]} pages of {pool[1]} tokens"
    size = _size((slots.state.cache, slots.state.proposer))
    logger.info("caches: %s%s, for %d slots of %d tokens", size, pages, slots.num_slots, slots.max_length)


def _arrays(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _dtypes(tree: PyTree) -> str:
    """Return the dtypes of the arrays of a tree, that with the most bytes first."""
    sizes: Counter[str] = Counter()
    for leaf in _arrays(tree):
        sizes[str(leaf.dtype)] += leaf.nbytes
    return " and ".join(name for name, _ in sizes.most_common(2))


def _size(tree: PyTree) -> str:
    num_bytes = sum(leaf.nbytes for leaf in _arrays(tree))
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


class Compiling:
    """Sum the seconds of blocks in which this process compiled a program, or read a compiled one.

    Attributes:
        seconds: the sum.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the seconds of a block if one of its programs is new."""
        seen: list[str] = []

        def note(event: str, duration_secs: float, **_: Any) -> None:
            if event in (COMPILED, READ):
                seen.append(event)

        start = time.perf_counter()
        monitoring.register_event_duration_secs_listener(note)
        try:
            yield
        finally:
            monitoring.unregister_event_duration_listener(note)
            if seen:
                self.seconds += time.perf_counter() - start


class Programs:
    """Count the programs that are compiled in a `with` block, and log each when it is ready.

    A record has the attribute `programs`: how many are ready, and how many there are in all. A handler can make a bar
    of it.

    Args:
        total: how many there are in all.
    """

    def __init__(self, total: int):
        self._total, self._num_ready, self._num_compiled = total, 0, 0
        self._lock = threading.Lock()
        self._compiled_in: Counter[int] = Counter()  # thread: programs that it has compiled and not read

    def __enter__(self) -> "Programs":
        self._start = time.perf_counter()
        monitoring.register_event_duration_secs_listener(self._count)
        logger.info("compiling %d programs", self._total, extra={"programs": (0, self._total)})
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        monitoring.unregister_event_duration_listener(self._count)
        if kind is None:
            folder, seconds = used_folder(), time.perf_counter() - self._start
            kept = "not kept" if folder is None else f"kept in {folder}"
            counts = self._num_ready, self._num_compiled
            logger.info("%d programs are ready, %d of them newly compiled, in %.1f s; %s", *counts, seconds, kept)

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in (COMPILED, READ):
            self._compiled_in[threading.get_ident()] += 1 if event == COMPILED else -1

    @contextmanager
    def making(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """Log that a program is ready after a block, which compiles it in this thread.

        Args:
            name: name of the program.
            seconds: how long it has taken before the block.
        """
        thread, start = threading.get_ident(), time.perf_counter()
        before = self._compiled_in[thread]
        yield
        seconds += time.perf_counter() - start
        is_compiled = self._compiled_in[thread] > before
        with self._lock:
            self._num_ready += 1
            self._num_compiled += is_compiled
            counts = self._num_ready, self._total
            how = "compiled" if is_compiled else "read"
            logger.info("program %d of %d %s in %.1f s: %s", *counts, how, seconds, name, extra={"programs": counts})


def name_of_chunks(num_tokens: int, *, log_probs: bool = False) -> str:
    """Return the name of the program that feeds tokens of prompts."""
    return f"{num_tokens} tokens of prompts" + (", with log-probabilities" if log_probs else "")


def name_of_step(use: str, num_slots: int, log_probs: bool, drafts: str | None) -> str:
    """Return the name of the program that takes a step of `num_slots` slots; steps of one kind name no drafts."""
    slots = f"{num_slots} slots" if num_slots > 1 else "one slot"
    parts = [f"step of {slots}", use, drafts, "with log-probabilities" if log_probs else None]
    return ", ".join(part for part in parts if part)
