"""The processes that repeat the calls of process 0."""

import queue
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from specjax import proposers, verifiers
from specjax.engine import compilation_cache
from specjax.engine.slots import Slots
from specjax.processes import fingerprint, messages
from specjax.processes.connection import END, READY, Connection, Lost
from specjax.processes.group import SECONDS_TO_END, Group
from specjax.processes.repeat import REPEATED
from specjax.types import Model, Proposer, Verifier

CALLS_AHEAD = 16  # calls that may be under way on the devices before the first of them is waited for


class Follower(Group):
    """A process that repeats the calls of process 0 to its own devices."""

    def __init__(self, *args: Any):
        self._timer: threading.Timer | None = None
        self._frames: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        super().__init__(*args)

    def end(self) -> None:
        """Take leave of process 0."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        with suppress(Lost):
            self._others[0].send(END)
        self._others[0].close()

    def follow(self, model: Model, proposer: Proposer | None = None, verifier: Verifier = verifiers.rejection) -> None:
        """Repeat the calls of process 0 until it ends.

        A first SIGINT or SIGTERM is left to process 0, which launchers send it to, too; a second one ends the process.

        Args:
            model: the target, as process 0 has loaded it.
            proposer: the proposer; None is plain decoding.
            verifier: the verifier that the `LLM` or the `Engine` of process 0 has.
        """
        proposer = proposer or proposers.none()
        replay = _Replay(model, proposer, verifier)
        with _probe() as file, _patience():
            about = fingerprint.of_model(model, verifier), fingerprint.of_proposer(proposer), file
            self._others[0].send(READY, messages.encode(about, lambda _: None))
            while (frame := self._frames.get())[0] != END:
                replay.repeat(frame[1])
            replay.finish()

    def _received(self, other: Connection, kind: bytes, content: bytes) -> None:
        if kind == END:
            self._is_ending = True
            self._timer = threading.Timer(SECONDS_TO_END, self._die, ["process 0 has ended"])
            self._timer.daemon = True
            self._timer.start()
        self._frames.put((kind, content))


class _Replay:
    """The slots of process 0, repeated."""

    def __init__(self, model: Model, proposer: Proposer, verifier: Verifier):
        self._model, self._proposer, self._verifier = model, proposer, verifier
        self._slots: dict[int, Slots] = {}
        self._results: dict[tuple[int, int], Any] = {}
        self._under_way: deque[Any] = deque()
        self._num_calls = 0

    def repeat(self, message: bytes) -> None:
        """Make the call of a message."""
        call = messages.decode(message, lambda *place: self._results[place])
        number, name, arguments, options, gone, dropped = call
        for place in gone:
            del self._results[tuple(place)]
        for each in dropped:
            del self._slots[each]
        if name == "__init__":
            result = self._make(number, **options)
        else:
            result = self._call(number, name, arguments, options)
        self._num_calls += 1
        leaves = jax.tree.leaves(result)
        self._results |= {(self._num_calls, index): leaf for index, leaf in enumerate(leaves)}
        self._under_way.append(leaves)
        if len(self._under_way) > CALLS_AHEAD:
            jax.block_until_ready(self._under_way.popleft())  # raises where a call has failed

    def finish(self) -> None:
        """Wait for the calls in flight."""
        jax.block_until_ready((list(self._under_way), [slots.state for slots in self._slots.values()]))

    def _make(self, number: int, *, is_plain: bool, has_cache: bool, **sizes: Any) -> Any:
        if not has_cache:
            compilation_cache.disable()
        proposer = proposers.none() if is_plain else self._proposer
        slots = self._slots[number] = Slots(self._model, proposer, verifier=self._verifier, **sizes)
        return slots.no_features

    def _call(self, number: int, name: str, arguments: tuple, options: dict[str, Any]) -> Any:
        if name not in REPEATED:
            raise ValueError(f"process 0 must send a call of slots that is to be repeated, got {name!r}")
        return getattr(self._slots[number], name)(*arguments, **options)


@contextmanager
def _probe() -> Iterator[str | None]:
    """Yield the name of a file in the compilation cache, by which process 0 sees whether it is its own."""
    folder = compilation_cache.used_folder()
    if folder is None or not Path(folder).is_dir():
        yield None
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix="specjax-process-") as file:
        yield Path(file.name).name


@contextmanager
def _patience() -> Iterator[None]:
    """Leave the first of the signals that end a process to process 0."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = signal.SIGINT, signal.SIGTERM

    def wait(number: int, frame: FrameType | None) -> None:
        for each, handler in zip(numbers, before, strict=True):
            signal.signal(each, handler)

    before = [signal.signal(number, wait) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
