"""Work for a client as long as it is there: read its body, submit its requests, and give them up when it leaves."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from specjax.engine.engine import Engine
from specjax.engine.pending import Pending
from specjax.sampling import SamplingParams
from specjax.server.errors import ApiError
from specjax.server.remote import RemoteEngine

MAX_BODY_BYTES = 4 * 2**20
BODY_SECONDS = 60.0  # in which a body must arrive
_NUM_CORES = getattr(os, "process_cpu_count", os.cpu_count)() or 1
THREADS_OF_CLIENT = min(32, _NUM_CORES + 4) // 2  # half of those that asyncio has

T = TypeVar("T")


class Submission(NamedTuple):
    """Arguments of `Engine.submit`."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    client: str | None  # who asks, as `guard` names it


class Disconnected(Exception):
    """The client has left."""


async def attended(receive: Receive, work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of work, which is cancelled when the client leaves or its time is over.

    Args:
        receive: tells that the client has left, after its body has been read.
        work: an awaitable, such as the call of a handler.
        seconds: its time; None is any.

    Raises:
        Disconnected: the client has left.
        TimeoutError: the time is over.
    """
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_left(receive))
    try:
        await asyncio.wait((worker, watcher), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        if watcher.done():
            raise Disconnected
        raise TimeoutError
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive) -> bytes:
    """Return a body.

    Raises:
        ApiError: the body is too long or slow.
        Disconnected: the client has left.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                content += message.get("body", b"")
                if len(content) > MAX_BODY_BYTES:
                    message = f"the body must have at most {MAX_BODY_BYTES} bytes"
                    raise ApiError(413, message, code="body_too_large", headers={"connection": "close"})
                if not message.get("more_body", False):
                    return bytes(content)
    except TimeoutError:
        message = f"the body must arrive within {BODY_SECONDS:g} seconds"
        raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from None


async def read_json(http: HttpRequest) -> Any:
    """Return the JSON value of a body.

    Raises:
        ApiError: the body is too long, slow, or no JSON.
        Disconnected: the client has left.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # which a page of another site cannot send without asking
        got = content_type[:100] or "none"
        raise ApiError(415, f"the header Content-Type must be application/json, got {got}", code="invalid_content_type")
    content = await read_body(http.receive)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body must be JSON: {error}", code="invalid_json") from None


async def submit(engine: Engine | RemoteEngine, submissions: Sequence[Submission]) -> list[Pending]:
    """Submit requests together: where one is refused, none runs. Long prompts do not hold others up.

    Raises:
        ValueError, QueueFull, RuntimeError: as `Engine.submit`.
    """

    def submit_all() -> list[Pending]:
        requests: list[Pending] = []
        try:
            for prompt, params, priority, salt, client in submissions:
                more = {"priority": priority, "cache_salt": salt, "client": client}
                requests.append(engine.submit(prompt, params, **more))
        except BaseException:
            cancel(requests)
            raise
        return requests

    requests = await in_thread(submit_all, undo=cancel)
    try:
        await asyncio.gather(*(request.entered() for request in requests))
    except BaseException:
        cancel(requests)
        raise
    return requests


async def in_thread(function: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run a function in a thread and return its result; if the caller is cancelled meanwhile, `undo` gets it."""
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: done.exception() or undo(done.result()))
        raise


class Turns:
    """Run functions in threads, of one client `THREADS_OF_CLIENT` at a time, so that others find a thread."""

    def __init__(self):
        self._free: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # as long as somebody waits

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """Run a function in a thread, return its result. It keeps its turn to its end, also where the caller leaves."""
        loop, free = asyncio.get_running_loop(), self._free.get(client)
        if free is None:
            free = self._free[client] = asyncio.Semaphore(THREADS_OF_CLIENT)
        await free.acquire()

        def run() -> T:
            try:
                return function()
            finally:
                with suppress(RuntimeError):  # of a loop that has ended
                    loop.call_soon_threadsafe(free.release)

        return await in_thread(run)


def cancel(requests: Sequence[Pending]) -> None:
    """End requests; requests that have ended stay as they are."""
    for request in requests:
        request.cancel()
