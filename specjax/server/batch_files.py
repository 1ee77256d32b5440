"""Answer a file of requests in OpenAI's batch format, so that a run that was killed goes on where it was.

A line of the file is `{"custom_id", "method", "url", "body"}`. Each becomes one line of the file of results, in the
order in which the requests end, as soon as they do. That file alone says which requests are done: a run that finds it
there drops a last line without its end, and leaves out the requests that have a result.
"""

import asyncio
import errno
import hashlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from specjax.engine.requests import Result
from specjax.sampling import SamplingParams
from specjax.server import answers, protocol
from specjax.server.fields import BadRequest
from specjax.server.served import Served

if TYPE_CHECKING:
    from rich.progress import Progress

MAX_LINE_BYTES = 2**24  # of a request
MAX_ID_LENGTH = 512  # characters of a custom_id
REQUESTS_PER_SLOT = 4  # requests in the engine at a time, for each of its slots
GRAMMARS = 8  # different grammars of requests that run at a time

_PARSERS: dict[str, Callable[[Any, Served], protocol.Call]] = {
    "/v1/completions": protocol.parse_completion,
    "/v1/chat/completions": protocol.parse_chat,
}
_BEGINNING = b'{"id": "'  # of every result
_BY_LINE = "line-"  # begins the id of a result whose request has no custom_id: the number of its line follows


class Generates(Protocol):
    """The method of an engine that answering needs."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Result: ...


class Request(NamedTuple):
    """A line of the file of requests."""

    number: int  # of the line, from 1
    custom_id: str | None  # None if the line has none
    url: str
    body: Any
    error: str | None  # the fault of the line itself, None without one

    @property
    def key(self) -> bytes:
        """A short stand-in for the id, which sets of many requests are made of."""
        return _key(self.custom_id, f"{_BY_LINE}{self.number}")


class Numbers(NamedTuple):
    """Counts of a run."""

    answered: int  # requests that it answered
    errors: int  # answered requests whose result is an error
    known: int  # requests that had a result before


def _key(custom_id: str | None, id: str) -> bytes:
    named = f"id {custom_id}" if custom_id is not None else f"line {id}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def read_requests(path: Path) -> Iterator[Request]:
    """Yield the requests of a file one by one. Empty lines are no requests."""
    with path.open("rb") as file:
        for number, (line, is_whole) in enumerate(_lines(file), 1):
            if not is_whole:
                yield Request(number, None, "", None, f"must have at most {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield _request(number, line)


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each line, and whether it is whole: of a line that is too long only the beginning is read into memory."""
    while line := file.readline(MAX_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        yield line, is_whole
        while not is_whole and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)


def _request(number: int, line: bytes) -> Request:
    def bad(custom_id: str | None, message: str) -> Request:
        return Request(number, custom_id, "", None, message)

    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        return bad(None, f"must be JSON in UTF-8: {error}")
    if not isinstance(value, dict):
        return bad(None, f"must be an object, got {type(value).__name__}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_LENGTH:
        return bad(None, f"custom_id must be a string of 1 to {MAX_ID_LENGTH} characters")
    if unknown := set(value) - {"custom_id", "method", "url", "body"}:
        return bad(custom_id, f"must have custom_id, method, url and body, got {min(unknown)[:100]!r}")
    if value.get("method") != "POST":
        return bad(custom_id, "method must be POST")
    if value.get("url") not in list(_PARSERS):
        return bad(custom_id, f"url must be one of {', '.join(_PARSERS)}")
    return Request(number, custom_id, value["url"], value.get("body"), None)


def check_ids(path: Path) -> dict[bytes, None]:
    """Return the key of every request of a file.

    Raises:
        ValueError: two requests have the same custom_id.
    """
    keys: dict[bytes, None] = {}
    for request in read_requests(path):
        if request.key in keys:
            message = f"every custom_id must be there once, got {request.custom_id!r} again"
            raise ValueError(f"{path}, line {request.number}: {message}")
        keys[request.key] = None
    return keys


def open_results(path: Path, known: Mapping[bytes, Any]) -> tuple[IO[bytes], set[bytes]]:
    """Open a file of results to append to, and return it with the keys of the requests that have a result.

    A last line without its end is cut off: its run was killed as it wrote.

    Args:
        path: the file; it is made where it is missing.
        known: keys of all requests.

    Raises:
        ValueError: the file has lines that are no results of these requests, or another process writes it.
    """
    file = path.open("ab+")
    try:
        _lock(path, file)
        file.seek(0)
        done, end = set(), 0
        for number, line in enumerate(iter(file.readline, b""), 1):
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                break
            end += len(line)
            key = _key_of_result(line)
            if key not in known or key in done:
                problem = "a second result of a request" if key in done else "no result of these requests"
                raise ValueError(f"{path}, line {number}: {problem}; move the file away to begin anew")
            done.add(key)
        file.truncate(end)
    except BaseException:
        file.close()
        raise
    return file, done


def _lock(path: Path, file: IO[bytes]) -> None:
    """Keep the file from other runs until it is closed, or this process ends."""
    try:
        import fcntl
    except ModuleNotFoundError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another process writes it") from None


def _key_of_result(line: bytes) -> bytes | None:
    try:
        value = json.loads(line.decode("utf-8"))
        return _key(value["custom_id"], value["id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def run(engine: Generates, served: Served, requests: Path, results: Path, *, num_slots: int, progress: bool) -> Numbers:
    """Answer the requests of a file that have no result yet.

    Args:
        engine: a `specjax.Engine`, or another object with its `generate`.
        served: the model, as the requests see it.
        requests: the file of requests.
        results: the file of results, to which the new ones are appended.
        num_slots: number of slots of the engine.
        progress: whether to show a progress bar on standard error.

    Returns:
        How many requests were answered.

    Raises:
        ValueError: two requests have the same custom_id, or the file of results is of other requests.
        OSError: the file of results cannot be written.
        RuntimeError: the engine has failed. Written results stay.
    """
    keys = check_ids(requests)
    file, done = open_results(results, keys)
    with file, _progress(progress) as bar:
        task = bar.add_task("requests", total=len(keys), completed=len(done))
        waiting = (request for request in read_requests(requests) if request.key not in done)

        async def write() -> int:
            num_errors = 0
            async for result in _answer_all(engine, served, waiting, REQUESTS_PER_SLOT * num_slots):
                _append(file, result)
                num_errors += result["error"] is not None or result["response"]["status_code"] != 200
                bar.advance(task)
            return num_errors

        num_errors = asyncio.run(write())
    return Numbers(len(keys) - len(done), num_errors, len(done))


def _append(file: IO[bytes], result: dict[str, Any]) -> None:
    """Write a line in one call, so that it is all that a kill can cut.

    Raises:
        OSError: it cannot be written, or the file has been deleted; the error names the file.
    """
    line = json.dumps(result, allow_nan=False).encode() + b"\n"
    try:
        if not os.fstat(file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "The file has been deleted")
        while line:
            line = line[os.write(file.fileno(), line) :]  # past the buffer, which would be written again as it closes
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def _progress(is_shown: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not is_shown)


async def _answer_all(
    engine: Generates, served: Served, requests: Iterator[Request], limit: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the results of requests as they end, with at most `limit` of them under way."""
    running: set[asyncio.Task] = set()
    try:
        for request in requests:
            running.add(asyncio.create_task(_result(engine, served, request)))
            while len(running) >= limit:
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield task.result()
        for task in asyncio.as_completed(running):
            yield await task
    finally:
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)


async def _result(engine: Generates, served: Served, request: Request) -> dict[str, Any]:
    """Return the result of a request, also of one that is refused."""
    unanswered = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": None}
    if request.error is not None:
        if request.custom_id is None:
            unanswered["id"] = f"{_BY_LINE}{request.number}"
        message = f"line {request.number} {request.error}"
        return unanswered | {"error": {"code": "invalid_line", "message": message}}
    try:
        status, body = 200, await _answer(engine, served, request)
    except BadRequest as error:
        status, body = error.status, error.body()
    except (RuntimeError, CancelledError):  # of the engine, so that no request can be answered
        raise
    except Exception as error:  # of this request alone
        return unanswered | {"error": {"code": "server_error", "message": f"{type(error).__name__}: {error}"}}
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return unanswered | {"response": response, "error": None}


async def _answer(engine: Generates, served: Served, request: Request) -> dict[str, Any]:
    """Return the body of the answer to a request."""
    call = _PARSERS[request.url](request.body, served)
    if call.stream:
        raise BadRequest("stream must be false in a file of requests", "stream", "unsupported_parameter")
    options = {"priority": call.priority, "cache_salt": call.cache_salt}
    generated = [asyncio.ensure_future(engine.generate(prompt, call.params, **options)) for prompt in call.prompts]
    try:
        results = await asyncio.gather(*generated)
    except ValueError as error:
        raise protocol.bad_parameter(error, call.constraint) from error
    finally:
        for future in generated:
            future.cancel()
        await asyncio.gather(*generated, return_exceptions=True)
    return answers.answer(call, results, answers.new_head(call), served)
