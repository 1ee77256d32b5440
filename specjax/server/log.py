"""The log of a server: a line for each request, and under load a line on the engine.

Lines have neither prompts nor answers, keys, queries or headers of clients but `X-Request-Id`.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from queue import Full, Queue
from typing import TextIO
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.engine.engine import Engine
from specjax.engine.requests import Result
from specjax.engine.stats import Stats
from specjax.server.calls import in_thread
from specjax.server.remote import RemoteEngine

LOAD_SECONDS = 10.0  # between two lines on the load
QUIET_PATHS = ("/health", "/metrics")  # which machines ask for all the time: no line where the answer is 200
MAX_PATH_LENGTH = 200  # characters of a path in a line
MAX_LINES = 4096  # that wait to be written
SECONDS_TO_WRITE = 1.0  # that lines have at the end

Write = Callable[[str], object]


class Lines:
    """Write lines with the time to a file, in a thread, so that nobody waits for whoever reads the file.

    Where `MAX_LINES` wait already, the next ones are left out, and a later line says how many.

    Args:
        file: the file; None, as `sys.stderr` is where it is closed, takes nothing.
    """

    def __init__(self, file: TextIO | None):
        self._file = file
        self._queue: Queue[str | None] = Queue(MAX_LINES)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="specjax log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Write a line, after the time."""
        try:
            self._queue.put_nowait(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}\n")
        except Full:
            self._num_lost += 1

    def close(self) -> None:
        """Wait a moment until the remaining lines are written."""
        with suppress(Full):
            self._queue.put(None, timeout=SECONDS_TO_WRITE)
        self._thread.join(SECONDS_TO_WRITE)

    def _run(self) -> None:
        num_told = 0  # of lines that were left out
        while (line := self._queue.get()) is not None:
            if num_new := self._num_lost - num_told:
                line += f"{num_new} lines were left out, as the log was not read\n"
                num_told += num_new
            if self._file is not None:
                with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                    self._file.write(line)
                    self._file.flush()


@dataclass
class _Noted:
    """Facts of a request besides its answer's status."""

    results: list[Result] = field(default_factory=list)
    is_given_up: bool = False


_noted: ContextVar[_Noted | None] = ContextVar("noted", default=None)


def note_result(result: Result) -> None:
    """Note the result of a prompt for the line of the request that the caller works on."""
    if (noted := _noted.get()) is not None:
        noted.results.append(result)


def note_end() -> None:
    """Note that the request that the caller works on ends early: its client left, its time was over, or it failed."""
    if (noted := _noted.get()) is not None:
        noted.is_given_up = True


class AccessLog:
    """Stand before an application, and write a line for each request when it has been answered.

    Args:
        app: the application.
        write: writes a line.
    """

    def __init__(self, app: ASGIApp, write: Write):
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        request_id = ""

        async def send_and_look(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        start, noted = time.perf_counter(), _Noted()
        token = _noted.set(noted)
        try:
            await self._app(scope, receive, send_and_look)
        finally:
            _noted.reset(token)
            if not (scope["path"] in QUIET_PATHS and status == 200):
                self._write(request_line(scope, status, time.perf_counter() - start, noted, request_id))


def request_line(scope: Scope, status: int | None, seconds: float, noted: _Noted, request_id: str) -> str:
    """Return the line of a request, without the time: its method and path, then the known figures as `name=value`."""
    host = (scope.get("client") or ("-",))[0]
    path = quote(scope["path"], safe="/:@!$&'()*+,;=-._~")[:MAX_PATH_LENGTH]
    words = [host, scope["method"], path, "-" if status is None else str(status)]
    if noted.results:
        words += _figures(noted.results)
    words.append(f"seconds={seconds:.3f}")
    if noted.is_given_up:
        words.append("ended=early")
    if request_id:
        words.append(f"id={request_id}")
    return " ".join(words)


def _figures(results: list[Result]) -> list[str]:
    figures = [result.metrics for result in results]
    words = [
        f"prompt_tokens={sum(result.num_prompt_tokens for result in results)}",
        f"generated_tokens={sum(each.num_tokens for each in figures)}",
    ]
    first = min((each.time_to_first_token for each in figures if each.num_tokens), default=math.nan)
    if not math.isnan(first):
        words.append(f"first_token_seconds={first:.3f}")
    with_drafts = [each for each in figures if each.num_drafted]
    if with_drafts:
        num_steps = sum(each.num_steps for each in with_drafts)
        length = sum(each.num_steps * each.mean_acceptance_length for each in with_drafts) / num_steps
        words.append(f"acceptance_length={length:.2f}")
    return words


async def watch_load(engine: Engine | RemoteEngine, write: Write, seconds: float = LOAD_SECONDS) -> None:
    """Write a line every so many seconds in which the engine had something to do, until it ends.

    Args:
        engine: the engine.
        write: writes a line.
        seconds: the time between two lines.
    """
    with suppress(RuntimeError):  # the engine has failed
        before, since = await in_thread(engine.stats), time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            stats, now = await in_thread(engine.stats), time.monotonic()
            if stats.num_tokens > before.num_tokens or stats.num_running or stats.num_waiting:
                write(load_line(before, stats, now - since))
            before, since = stats, now


def load_line(before: Stats, now: Stats, seconds: float) -> str:
    """Return the line on the load between two moments, without the time.

    Args:
        before: the numbers of the engine at the first moment.
        now: those at the second.
        seconds: the time between the two.
    """
    words = [f"load tokens_per_second={(now.num_tokens - before.num_tokens) / seconds:.1f}"]
    num_drafts, num_drafted = now.num_drafts - before.num_drafts, now.num_drafted - before.num_drafted
    num_accepted = now.num_accepted - before.num_accepted
    if num_drafts:
        words.append(f"acceptance_length={1 + num_accepted / num_drafts:.2f}")
        words.append(f"acceptance_rate={num_accepted / num_drafted:.2f}")
    words += [f"running={now.num_running}", f"waiting={now.num_waiting}"]
    if now.pages is not None:
        pages = now.pages
        words.append(f"pages={pages.num_used}/{pages.num_used + pages.num_free + pages.num_cached}")
    return " ".join(words)
