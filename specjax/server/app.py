"""The routes of the server: bodies in, answers and streams out. `protocol` and `answers` know what is in them."""

import asyncio
import concurrent.futures
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import specjax
from specjax.engine.engine import Engine
from specjax.engine.pending import Pending, arrivals
from specjax.engine.requests import Piece, Result
from specjax.server import answers, protocol
from specjax.server.answers import ChoiceStream
from specjax.server.calls import Disconnected, Submission, Turns, attended, cancel, in_thread, read_json, submit
from specjax.server.errors import ApiError, api_error
from specjax.server.fields import Fields, check_tree
from specjax.server.guard import Guard
from specjax.server.messages import MAX_TEXT_LENGTH, encode_chat, read_messages, read_template_arguments
from specjax.server.metrics import CONTENT_TYPE, ServerMetrics
from specjax.server.protocol import Call
from specjax.server.remote import RemoteEngine
from specjax.server.served import Served
from specjax.server.tools import read_tools

LAST_WORDS_SECONDS = 5.0  # for the error that ends a stream
DONE = b"data: [DONE]\n\n"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second is for proxies


@dataclass(frozen=True)
class About:
    """What `/v1/models` tells of how the model is served."""

    num_draft_tokens: int  # drafts of a step; 0 is plain decoding
    verifier: str  # name of the verifier


class App:
    """The server as an ASGI application, `guard`, which holds all the others.

    Args:
        engine: the engine, of this process or of another; it is not closed here.
        served: the model of the engine.
        about: how it is served.
        api_keys: keys of clients; without any, everybody is one.
        request_timeout: seconds that a request may take.
        is_local: whether requests must name this machine as their host, which counts where there are no keys.

    Attributes:
        guard: the application to run.
        routes: the application behind the guard.
        engine: the engine.
    """

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        served: Served,
        about: About,
        *,
        api_keys: Sequence[str] = (),
        request_timeout: float = 600.0,
        is_local: bool = False,
    ):
        self.engine, self._served, self._about, self._timeout = engine, served, about, request_timeout
        self._started = int(time.time())
        self._metrics, self._turns = ServerMetrics(engine, served.name), Turns()
        self._page = resources.files("specjax.server").joinpath("page.html").read_text(encoding="utf-8")
        routes = [
            Route("/", self._show_page),
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/metrics", self._write_metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        self.routes = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
        self.routes.router.redirect_slashes = False  # a redirection would repeat the header Host
        self.guard = Guard(self.routes, api_keys, is_local=is_local and not api_keys)

    async def _show_page(self, http: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY"})

    async def _health(self, http: HttpRequest) -> Response:
        is_well = self.engine.is_running and not self.guard.is_ending
        return JSONResponse({"status": "ok" if is_well else "ending"}, 200 if is_well else 503)

    async def _version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": specjax.__version__})

    async def _write_metrics(self, http: HttpRequest) -> Response:
        return Response(await in_thread(self.metrics), media_type=CONTENT_TYPE)

    def metrics(self) -> bytes:
        """Return the numbers of the server in the text format of Prometheus."""
        return self._metrics.text()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "specjax",
            "max_model_len": self._served.max_length,
            "num_draft_tokens": self._about.num_draft_tokens,
            "verifier": self._about.verifier,
        }

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._served.name:
            raise ApiError(404, f"the only model is {self._served.name}", param="model", code="model_not_found")
        return JSONResponse(self._card())

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        tokens = await self._turns.run(http.state.client, lambda: _tokenized(body, self._served))
        return JSONResponse({"count": len(tokens), "max_model_len": self._served.max_length, "tokens": tokens})

    async def _detokenize(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        text = await self._turns.run(http.state.client, lambda: _detokenized(body, self._served))
        return JSONResponse({"prompt": text})

    async def _completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, protocol.parse_completion)

    async def _chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, protocol.parse_chat)

    async def _answer(self, http: HttpRequest, parse: Callable[[Any, Served], Call]) -> Response:
        """Return the answer to a request for completions, of which `parse` reads the body."""
        body, start = await read_json(http), time.perf_counter()
        deadline = start + self._timeout
        has_kinds = _take_kinds(body)
        call, requests = await attended(http.receive, self._begin(body, parse, http.state.client), self._timeout)
        answer, seconds = _Answer(self, call, requests, has_kinds, start), deadline - time.perf_counter()
        try:
            if call.stream:
                events = answer.events()
                first = await attended(http.receive, anext(events), seconds)
                return _EventStream(first, events, deadline - time.perf_counter(), partial(self._give_up, requests))
            return JSONResponse(await attended(http.receive, answer.body(), seconds))
        except BaseException as error:
            self._give_up(requests)
            if isinstance(error, ValueError) and str(error).startswith("guided_decoding"):  # it does not compile
                raise protocol.bad_parameter(error, call.constraint) from error
            raise

    async def _begin(self, body: Any, parse: Callable[[Any, Served], Call], client: str) -> tuple[Call, list[Pending]]:
        """Submit what a body asks for."""
        call = await self._turns.run(client, lambda: parse(body, self._served))
        submissions = [Submission(prompt, call.params, call.priority, client) for prompt in call.prompts]
        try:
            return call, await submit(self.engine, submissions)
        except ValueError as error:
            raise protocol.bad_parameter(error) from error

    def _give_up(self, requests: Sequence[Pending]) -> None:
        cancel(requests)
        self._metrics.record_abort()


class _Answer:
    """The answer to a call that came at `start`, whole or as the events of a stream."""

    def __init__(self, app: App, call: Call, requests: Sequence[Pending], has_kinds: bool, start: float):
        self._served, self._metrics, self._start = app._served, app._metrics, start
        self._call, self._requests, self._has_kinds = call, requests, has_kinds
        self._head = answers.new_head(call)

    async def _results(self) -> list[Result]:
        """Wait for the results."""
        results = list(await asyncio.gather(*(request.wait() for request in self._requests)))
        for result in results:
            self._metrics.record_result(result, time.perf_counter() - self._start)
        return results

    async def body(self) -> dict[str, Any]:
        """Return the body of the whole answer."""
        return answers.answer(self._call, await self._results(), self._head, self._served)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events that are there at a time, together; those of a grammar not before it is compiled."""
        call = self._call
        writers = [
            [
                _Writer(ChoiceStream(call, prompt, sample, self._head, self._served), self._has_kinds)
                for sample in range(call.params.n)
            ]
            for prompt in range(len(call.prompts))
        ]
        flat = [writer for samples in writers for writer in samples]
        held = b"".join(writer.start() for writer in flat) if call.is_chat or call.echo else b""
        if call.constraint is None:
            yield held
            held = b""
        last = None
        async for found in arrivals(self._requests):
            now = time.perf_counter()
            if last is not None:
                self._metrics.record_gap(now - last)
            last = now
            for prompt, piece in found:
                writers[prompt][piece.index].add(piece)
            yield held + b"".join(writer.take() for writer in flat)
            held = b""
        results = await self._results()
        ended = zip(writers, results, strict=True)
        yield held + b"".join(writer.finish(result) for samples, result in ended for writer in samples)
        if call.include_usage:
            yield event(answers.usage_chunk(call, results, self._head, self._served))
        yield DONE


class _Writer:
    """Write the events of one choice.

    Args:
        stream: makes the chunks.
        has_kinds: whether chunks say how each of their tokens came about; then each has one token with text.
    """

    def __init__(self, stream: ChoiceStream, has_kinds: bool):
        self._stream, self._has_kinds = stream, has_kinds
        self._pieces: list[Piece] = []
        self._kinds: list[str] = []

    def start(self) -> bytes:
        return event(self._stream.start())

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def take(self) -> bytes:
        """Return the events of the pieces that were added."""
        new, self._pieces = self._pieces, []
        if not new:
            return b""
        if not self._has_kinds:
            chunk = self._stream.feed(new)
            return b"" if chunk is None else event(chunk)
        return b"".join(self._with_kind(piece) for piece in new)

    def _with_kind(self, piece: Piece) -> bytes:
        self._kinds.append(piece.kind)
        chunk = self._stream.feed([piece])
        if chunk is None:
            return b""
        chunk["choices"][0]["token_kinds"], self._kinds = self._kinds, []
        return event(chunk)

    def finish(self, result: Result) -> bytes:
        chunks = self._stream.finish(result)
        if self._kinds:
            chunks[-1]["choices"][0]["token_kinds"] = self._kinds
        return b"".join(map(event, chunks))


class _EventStream(Response):
    """Send events as they come, until the client leaves or the time is over; an error is an event, and the last one.

    Args:
        first: the first events.
        events: those that follow.
        seconds: the time.
        give_up: is called if they do not come to their end.
    """

    def __init__(self, first: bytes, events: AsyncIterator[bytes], seconds: float, give_up: Callable[[], None]):
        super().__init__(media_type="text/event-stream", headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._first, self._events, self._seconds, self._give_up = first, events, seconds, give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(content: bytes, *, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})

        async def send_all() -> None:
            await send_part(self._first)
            async for content in self._events:
                if content:
                    await send_part(content)
            await send_part(b"", is_last=True)

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await attended(receive, send_all(), self._seconds)
        except Disconnected:
            self._give_up()
        except (Exception, asyncio.CancelledError) as error:
            self._give_up()
            async with asyncio.timeout(LAST_WORDS_SECONDS):  # the client may not be reading
                await send_part(event(api_error(error).body), is_last=True)


def event(body: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _take_kinds(body: Any) -> bool:
    """Take the field return_token_kinds out of a body, which is no part of OpenAI's protocol."""
    value = body.pop("return_token_kinds", None) if isinstance(body, dict) else None
    if not (value is None or isinstance(value, bool)):
        raise ApiError(400, "return_token_kinds must be true or false", param="return_token_kinds")
    if value and not body.get("stream"):
        raise ApiError(400, "return_token_kinds must be false unless stream is true", param="return_token_kinds")
    return bool(value)


def _fields(body: Any, served: Served) -> Fields:
    """Return a reader of a body that may name the model."""
    check_tree(body)
    fields = Fields(body)
    if (name := fields.any("model")) is not None:
        protocol.check_model(name, served)
    return fields


def _tokenized(body: Any, served: Served) -> list[int]:
    """Return the token ids that a body of /tokenize asks for: of a prompt, or of the messages of a chat."""
    fields = _fields(body, served)
    if fields.any("messages") is not None:
        messages, arguments = read_messages(fields), read_template_arguments(fields)
        tools, _ = read_tools(fields)
        fields.finish()
        return encode_chat(served, messages, tools and tools.described, arguments)
    fields.require("prompt", "a string")
    prompt = fields.text("prompt", MAX_TEXT_LENGTH) or ""
    has_special = fields.boolean("add_special_tokens", True)
    fields.finish()
    return served.encode(prompt, add_special_tokens=has_special).ids


def _detokenized(body: Any, served: Served) -> str:
    """Return the text of the token ids in a body of /detokenize."""
    fields = _fields(body, served)
    expected = f"a list of token ids in [0, {served.vocab_size})"
    fields.require("tokens", expected)
    tokens = fields.items("tokens", MAX_TEXT_LENGTH) or []
    if not all(type(token) is int and 0 <= token < served.vocab_size for token in tokens):
        raise fields.refuse("tokens", expected)
    fields.finish()
    return served.tokenizer.decode(tokens, skip_special_tokens=False)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return api_error(error).response()


async def _on_leaving(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Answer to what no route takes."""
    assert isinstance(error, HTTPException), "no other errors come here"
    if error.status_code == 405:
        wrong = f"{http.scope['path']} does not take {http.method}"
        return ApiError(405, wrong, code="method_not_allowed", headers=error.headers).response()
    return ApiError(error.status_code, f"there is nothing at {http.scope['path']}", code="not_found").response()


_TOLD = ApiError, protocol.BadRequest, RuntimeError, TimeoutError, concurrent.futures.CancelledError
ERROR_HANDLERS: dict[Any, Callable] = {
    HTTPException: _on_http_error,
    Exception: _on_error,
    Disconnected: _on_leaving,
    **dict.fromkeys(_TOLD, _on_error),
}
