"""Process 0: every call to the devices is sent to the others before it is made."""

import functools
import queue
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax import scorers
from specjax.engine import compilation_cache
from specjax.processes import fingerprint, messages
from specjax.processes.connection import CALL, END, Connection, Lost
from specjax.processes.group import SECONDS_TO_END, Group
from specjax.proposers import NoDrafts
from specjax.types import Model, Proposer, Scorer, Verifier

if TYPE_CHECKING:
    from specjax.engine.slots import Slots


class Leader(Group):
    """Process 0 as it sees the others, which repeat its calls of an `LLM` or an `Engine` on a shared model.

    Attributes:
        lock: is held while a call is sent and made, so that every process has the calls in the same order.
    """

    def __init__(self, *args: Any):
        self.lock = threading.RLock()
        self._num_slots = self._num_calls = 0
        self._places: dict[int, tuple[int, int]] = {}  # where arrays come from, by their `id`
        self._gone: deque[tuple[int, int]] = deque()  # places of arrays that nobody has any more
        self._dropped: deque[int] = deque()  # slots that nobody has any more
        self._ready: queue.SimpleQueue[tuple[Connection, bytes]] = queue.SimpleQueue()
        self._models: dict[Connection, Any] = {}  # facts on the models that each of the others has loaded
        self._known: Any = None  # facts that were compared with these
        super().__init__(*args)

    def end(self) -> None:
        """Tell the others that there is no more to do, and wait until they have done it."""
        self._is_ending = True
        try:
            for other in self._others.values():
                other.send(END)
        except Lost as error:
            self._die(str(error))
        for thread, other in zip(self._readers, self._others.values(), strict=True):
            thread.join(SECONDS_TO_END)
            if thread.is_alive():
                self._die(f"{other.name} has not ended within {SECONDS_TO_END} seconds after process 0")
            other.close()

    def start(
        self, slots: "Slots", proposer: Proposer, verifier: Verifier, scorer: Scorer, sizes: dict[str, Any]
    ) -> "Calls":
        """Have the others make slots of the same sizes.

        Raises:
            ValueError: they have another model, or the scorer or a size cannot be sent.
        """
        if slots.capacities.logits_processors:
            raise ValueError(
                "logits_processors must be None where several processes share a model: functions stay here"
            )
        if scorer is not scorers.mqa:
            raise ValueError(
                f"scorer must be specjax.scorers.mqa where several processes share a model, got {scorer!r}"
            )
        self._compare(slots.model, proposer, verifier)
        self._num_slots += 1
        sizes = sizes | {"is_plain": isinstance(proposer, NoDrafts), "has_cache": self._has_cache}
        calls = Calls(self, self._num_slots)
        calls.send("__init__", (), sizes)
        weakref.finalize(slots, self._dropped.append, self._num_slots).atexit = False
        return calls

    def send(self, number: int, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
        """Send a call of the slots with a number, and return the number of the call."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        given = number, name, arguments, options, gone, dropped
        message = messages.encode(given, lambda leaf: self._places.get(id(leaf)))
        for other in self._others.values():
            try:
                other.send(CALL, message)
            except Lost as error:
                self._die(str(error))
        self._num_calls += 1
        return self._num_calls

    def keep(self, call: int, result: Any) -> None:
        """Note where the arrays of a result come from, so that later calls may take them."""
        for index, leaf in enumerate(jax.tree.leaves(result)):
            self._places[id(leaf)] = call, index
            weakref.finalize(leaf, self._forget, id(leaf), (call, index)).atexit = False

    def _forget(self, key: int, place: tuple[int, int]) -> None:
        if self._places.get(key) == place:  # else another array has taken its `id`
            del self._places[key]
        self._gone.append(place)

    def _received(self, other: Connection, kind: bytes, content: bytes) -> None:
        if kind != END:
            self._ready.put((other, content))
        elif not self._is_ending:
            self._die(f"{other.name} has ended before process 0")

    def _compare(self, model: Model, proposer: Proposer, verifier: Verifier) -> None:
        """Compare the loaded models with the models of the others, and wait until they have loaded theirs."""
        while len(self._models) < len(self._others):
            other, content = self._ready.get()
            self._models[other] = messages.decode(content, lambda *_: None)
        given = model.params, proposer, verifier
        if self._known is not None and all(a is b for a, b in zip(given, self._known, strict=True)):
            return
        for number, other in self._others.items():
            theirs, drafts, _ = self._models[other]
            fingerprint.check_same(fingerprint.of_model(model, verifier), theirs, number)
            if not isinstance(proposer, NoDrafts):
                fingerprint.check_same(fingerprint.of_proposer(proposer), drafts, number)
        self._known = given

    @functools.cached_property
    def _has_cache(self) -> bool:
        """Whether all processes find the programs that process 0 compiles; if not, none may look for any.

        Processes compile together on GPUs: one that found a program would leave the others waiting.
        """
        folder = compilation_cache.used_folder()
        if folder is None:
            return False
        files = [found[2] for found in self._models.values()]
        if all(file is not None and (Path(folder) / file).exists() for file in files):
            return True
        print(
            f"specjax: warning: the other processes do not share the compilation cache {folder}, so every start "
            "compiles anew",
            file=sys.stderr,
        )
        compilation_cache.disable()
        return False


class Calls:
    """The calls of one `Slots`, on their way to the other processes."""

    def __init__(self, leader: Leader, number: int):
        self._leader, self._number = leader, number
        self._last = 0
        self.lock = leader.lock

    def send(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Send a call before it is made."""
        self._last = self._leader.send(self._number, name, arguments, options)

    def keep(self, result: Any) -> None:
        """Note the result of the last call."""
        self._leader.keep(self._last, result)
