"""An engine in another process, as the process that speaks HTTP sees it."""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from specjax.engine.pending import Pending, wake
from specjax.engine.requests import Piece
from specjax.engine.stats import Stats
from specjax.sampling import SamplingParams
from specjax.server import wire


class RemoteRequest(Pending):
    """A request that an engine in another process works on. It has the methods of `Request`."""

    def __init__(self, engine: "RemoteEngine", number: int):
        super().__init__()
        self._entered: Future[None] = Future()  # until the engine takes or refuses it
        self._entered.set_running_or_notify_cancel()  # whoever waits for it does not end it
        self._engine, self._number = engine, number
        self._pieces: list[Piece] = []

    async def entered(self) -> None:
        await asyncio.wrap_future(self._entered)

    def cancel(self) -> None:
        self._engine.ask("cancel", self._number)

    def _reader(self) -> Callable[[], list[Piece]]:
        count = 0

        def read() -> list[Piece]:
            nonlocal count
            old, count = count, len(self._pieces)
            return self._pieces[old:count]

        return read

    def enter(self) -> None:
        """Note that the engine has taken it."""
        self._entered.set_result(None)

    def add(self, pieces: list[list[Any]]) -> None:
        """Take new pieces."""
        self._pieces += map(wire.read_piece, pieces)

    def finish(self, result: list[Any]) -> None:
        """End with a result."""
        self._future.set_result(wire.read_result(result, self._pieces))

    def fail(self, error: Exception) -> None:
        """End without a result, or before the engine has taken it."""
        (self._future if self._entered.done() else self._entered).set_exception(error)


class RemoteEngine:
    """An engine in another process, with the methods of `Engine` that a server needs.

    `stats` waits for the other process, so that the thread that calls `receive` must not call it.

    Args:
        send: sends bytes to the other process, from any thread, without waiting.
    """

    def __init__(self, send: Callable[[bytes], object]):
        self._send = send
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._live: dict[int, RemoteRequest] = {}
        self._stats: dict[int, Future[Stats]] = {}
        self._failure: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._failure is None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        client: str | None = None,
    ) -> RemoteRequest:
        """Hand in a request, and return at once; `entered` of the request raises the errors of `Engine.submit`."""
        request = RemoteRequest(self, number := next(self._numbers))
        question = wire.write_submission(number, prompt, params, priority, cache_salt, client)
        with self._lock:
            self._check_running()
            self._live[number] = request
        self._send(question)
        return request

    def stats(self) -> Stats:
        """Return the engine's load now, and its counters."""
        number, found = next(self._numbers), Future()
        with self._lock:
            self._check_running()
            self._stats[number] = found
        self.ask("stats", number)
        return found.result()

    def ask(self, kind: str, number: int) -> None:
        """Ask the engine for something that needs no more words; one that has ended does not hear it."""
        if self.is_running:
            self._send(wire.write_question(kind, number))

    def receive(self, data: bytes) -> list[str]:
        """Take a frame of events, and return the words in it that are about no request."""
        changed: list[RemoteRequest] = []
        words, is_lost = [], False
        for kind, number, content in json.loads(data) if self.is_running else ():
            if kind == "pieces":
                changed.append(request := self._live[number])
                request.add(content)
            elif kind == "entered":
                self._live[number].enter()
            elif kind == "result":
                self._live.pop(number).finish(content)
            elif kind == "error":
                self._live.pop(number).fail(wire.read_error(content))
            elif kind == "stats":
                self._stats.pop(number).set_result(wire.read_stats(content))
            elif kind == "lost":
                is_lost = True
            else:
                words.append(kind)
        wake(changed)
        if is_lost:
            self.lose()
        return words

    def lose(self) -> None:
        """Fail all requests, because the engine has failed or its process has ended."""
        with self._lock:
            self._failure = self._failure or RuntimeError("the engine has failed")
            requests, waiting = list(self._live.values()), list(self._stats.values())
            self._live.clear()
            self._stats.clear()
        for request in requests:
            request.fail(self._failure)
        for found in waiting:
            found.set_exception(self._failure)

    def _check_running(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
