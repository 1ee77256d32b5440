"""A request that has not ended: its pieces as they come, to those who wait for them, and its result."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

from specjax.engine.requests import Piece, Result


class Loop(Protocol):
    """A caller of functions in its thread, as event loops are."""

    def call_soon_threadsafe(self, function: Callable[..., object], /, *arguments: Any) -> object: ...


class Pending:
    """A request for its readers, whatever process works on it."""

    def __init__(self):
        self._future: Future[Result] = Future()
        self._future.set_running_or_notify_cancel()  # only the engine or its proxy ends it
        self._future.add_done_callback(lambda _: wake([self]))
        self._listeners: list[tuple[Loop | None, Callable[[], object]]] = []

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result.

        Args:
            timeout: the most seconds to wait; None waits until the request ends.

        Raises:
            TimeoutError: the request has not ended in time.
            concurrent.futures.CancelledError: the request was cancelled, or the engine closed.
            RuntimeError: the engine has failed.
        """
        return self._future.result(timeout)

    async def entered(self) -> None:
        """Wait until the engine has taken the request, or raise the errors of `Engine.submit`."""

    async def wait(self) -> Result:
        """Return the result, as `result` does, and leave the event loop to others until it is there.

        If the caller is cancelled, the request goes on.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def set_done(_: object) -> None:
            with suppress(RuntimeError):  # of an event loop that has been closed
                loop.call_soon_threadsafe(done.set)

        self._future.add_done_callback(set_done)
        await done.wait()
        return self._future.result()

    def cancel(self) -> None:
        """End the request. Its output so far is lost, and its slots are free for others before the next step."""
        raise NotImplementedError

    def _reader(self) -> Callable[[], list[Piece]]:
        """Return a function that returns the pieces that have come since its last call."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Piece]:
        changed = threading.Event()
        with self.listening(changed.set):
            for pieces in self.new_pieces():
                yield from pieces
                if not pieces:
                    changed.wait()
                    changed.clear()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for arrived in arrivals([self]):
            for _, piece in arrived:
                yield piece

    @contextmanager
    def listening(self, notify: Callable[[], object], loop: Loop | None = None) -> Iterator[None]:
        """Have `notify` called when there are pieces, or an end: in a loop, or in the thread that brings them."""
        listener = loop, notify
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def new_pieces(self) -> Iterator[list[Piece]]:
        """Yield the pieces that have come since the last time, maybe none, until the request ends."""
        read, is_done = self._reader(), False
        while not is_done:
            is_done = self._future.done()  # before the pieces, so that none is left
            new = read()
            if new or not is_done:
                yield new
        self._future.result()


async def arrivals(requests: Sequence[Pending]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """Yield the pieces of several requests as they come, each with the index of its request; all there are at a time.

    Raises:
        RuntimeError, concurrent.futures.CancelledError: as `Pending.result`, after the pieces before.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    with ExitStack() as stack:
        for request in requests:
            stack.enter_context(request.listening(changed.set, loop))
        live = {i: request.new_pieces() for i, request in enumerate(requests)}
        while live:
            changed.clear()  # before they are looked at
            found, error = [], None
            for i, new in tuple(live.items()):
                try:
                    found += [(i, piece) for piece in next(new)]
                except StopIteration:
                    del live[i]
                except Exception as raised:
                    error = raised
            if found:
                yield found
            if error is not None:
                raise error
            if live and not any(requests[i].is_done for i in live):
                await changed.wait()


def wake(requests: Iterable[Pending]) -> None:
    """Tell those who listen to requests; each loop is called once."""
    of_loop: defaultdict[Loop, list[Callable[[], object]]] = defaultdict(list)
    for request in requests:
        for loop, notify in tuple(request._listeners):
            if loop is None:
                notify()
            else:
                of_loop[loop].append(notify)
    for loop, functions in of_loop.items():
        with suppress(RuntimeError):  # of an event loop that has been closed
            loop.call_soon_threadsafe(_call_all, functions)


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()
