"""The engine's side of the process that speaks HTTP, which has a separate interpreter, and no devices."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from specjax.engine.engine import Engine
from specjax.engine.pending import Pending
from specjax.engine.requests import Piece
from specjax.processes.child import frame, read_frame, start_child
from specjax.server import wire

SECONDS_TO_END = 10.0  # that the process has when the engine leaves
TICK = 0.1  # seconds between two looks at whether the engine still runs
TURN = 1e-3  # seconds that threads here run at a time while others wait: new requests and tokens wait no longer


@contextmanager
def http_process(listener: socket.socket) -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    """Start the process that speaks HTTP, and end it with the block, if it has not ended.

    Args:
        listener: the socket that it will listen at.

    Yields:
        The process, and the socket that a `Desk` speaks to it by.
    """
    channel, theirs = socket.socketpair()
    with channel:
        with theirs:
            files = theirs.fileno(), listener.fileno()
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            own = {"start_new_session": True}  # so that a terminal interrupts the other process alone
            process = start_child("specjax.server.http_process", *map(str, files), pass_fds=files, **streams, **own)
        try:
            yield process, channel
        finally:
            _leave(channel)
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Desk:
    """Serve the HTTP process: submit, cancel and stream its requests.

    The thread of the engine never waits for it: another thread sends new pieces when the last frame has been taken, so
    that a slow process gets fewer and larger frames.

    Args:
        channel: a socket that is connected with the process.
        setup: first message to the process, for JSON. The process loads its modules while the engine compiles.
    """

    def __init__(self, channel: socket.socket, setup: dict[str, Any]):
        self._channel = channel
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple]] = SimpleQueue()  # for the thread that sends
        self._words: SimpleQueue[str] = SimpleQueue()  # for the thread that serves
        self._live: dict[int, tuple[Pending, Iterator[list[Piece]]]] = {}
        self._changed: dict[int, None] = {}  # the requests with something new
        self._news: list[list[Any]] = []
        first = frame(json.dumps(setup).encode())
        threading.Thread(target=self._write, args=(first,), name="specjax sender", daemon=True).start()

    def serve(self, engine: Engine, greet: Callable[[], object]) -> None:
        """Serve the process until it ends; its requests end with it.

        Args:
            engine: the engine.
            greet: is called when the process listens.
        """
        threading.Thread(target=self._read, args=(engine,), name="specjax reader", daemon=True).start()
        self._tell("start")
        interval = sys.getswitchinterval()
        sys.setswitchinterval(TURN)
        try:
            self._attend(engine, greet)
        finally:
            sys.setswitchinterval(interval)
            self.call_soon_threadsafe(self._stop)

    def _attend(self, engine: Engine, greet: Callable[[], object]) -> None:
        is_lost = False
        while True:
            try:
                word = self._words.get(timeout=TICK)
            except Empty:
                if not (engine.is_running or is_lost):
                    is_lost = True
                    self._tell("lost")
                continue
            if word == "end":
                return
            greet()

    def end(self) -> None:
        """Let the process end when its requests have; the second time, at once. A handler of signals may call this."""
        self._tell("end")

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread that sends."""
        self._calls.put((function, arguments))

    def _tell(self, kind: str, number: int = 0, content: Any = None) -> None:
        self.call_soon_threadsafe(self._add, kind, number, content)

    def _add(self, kind: str, number: int, content: Any) -> None:
        self._news.append([kind, number, content])

    def _read(self, engine: Engine) -> None:
        """Read and serve questions, in a thread, until the process ends."""
        try:
            with suppress(EOFError, OSError), self._channel.makefile("rb") as file:
                while True:
                    kind, number, *content = wire.read_question(read_frame(file))
                    if kind == "submit":
                        self._submit(engine, number, *content)
                    elif kind == "cancel":
                        self.call_soon_threadsafe(self._cancel, number)
                    elif kind == "stats":
                        self._tell("stats", number, wire.write_stats(engine.stats()))
                    else:
                        self._words.put(kind)
        finally:
            self._words.put("end")

    def _submit(
        self, engine: Engine, number: int, prompt: Any, params: Any, priority: int, salt: str, client: str | None
    ) -> None:
        try:
            request = engine.submit(prompt, params, priority=priority, cache_salt=salt, client=client)
        except Exception as error:
            self._tell("error", number, wire.write_error(error))
        else:
            self._tell("entered", number)
            self.call_soon_threadsafe(self._open, number, request)

    def _open(self, number: int, request: Pending) -> None:
        self._live[number] = request, self._listened(number, request)
        self._changed[number] = None

    def _listened(self, number: int, request: Pending) -> Iterator[list[Piece]]:
        with request.listening(partial(self._changed.setdefault, number), self):
            yield from request.new_pieces()

    def _cancel(self, number: int) -> None:
        if number in self._live:
            self._live[number][0].cancel()

    def _write(self, data: bytes) -> None:
        """Send frames, in a thread, beginning with `data`."""
        try:
            while True:
                self._channel.sendall(data)
                function, arguments = self._calls.get()
                with suppress(Empty):
                    while True:
                        function(*arguments)
                        function, arguments = self._calls.get_nowait()
                for number in self._changed:
                    self._add_news_of(number)
                self._changed.clear()
                data, self._news = wire.write_news(self._news) if self._news else b"", []
        except OSError:
            pass  # the other process has ended, which `_read` notices
        finally:
            _leave(self._channel)
            for number in self._live:
                self._cancel(number)

    def _stop(self) -> None:
        raise ConnectionAbortedError("the other process has ended")

    def _add_news_of(self, number: int) -> None:
        if number not in self._live:
            return  # it had ended when it was told so
        request, arrived = self._live[number]
        try:
            while True:
                if pieces := next(arrived):
                    self._add("pieces", number, pieces)
                if not request.is_done:
                    return
        except StopIteration:
            self._add("result", number, wire.write_result(request.result()))
        except Exception as error:
            self._add("error", number, wire.write_error(error))
        del self._live[number]


def _leave(channel: socket.socket) -> None:
    """Let both ends of a channel notice that nothing comes any more."""
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
