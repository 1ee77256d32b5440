"""The routes of the server: bodies in, answers and streams out. `protocol` and `answers` know their fields."""

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.engine.engine import Engine
from specjax.engine.jobs import NoTokenError
from specjax.engine.pending import Pending, arrivals
from specjax.engine.requests import Result
from specjax.server import anthropic, protocol, responses
from specjax.server.anthropic import MessageAnswer
from specjax.server.calls import Disconnected, Submission, Turns, attended, cancel, in_thread, read_json, submit
from specjax.server.docs_page import docs_page
from specjax.server.errors import ApiError, api_error
from specjax.server.guard import Guard
from specjax.server.log import note_end, note_result
from specjax.server.metrics import CONTENT_TYPE, ServerMetrics
from specjax.server.operations import openapi, operations
from specjax.server.protocol import Call
from specjax.server.remote import RemoteEngine
from specjax.server.responses import ResponseAnswer
from specjax.server.served import Served, tokenizer_info
from specjax.server.streams import Answer, CompletionAnswer
from specjax.server.tool_texts import COMPACT, dump
from specjax.version import __version__

LAST_WORDS_SECONDS = 5.0  # for the error that ends a stream
PING_SECONDS = 15.0  # of silence after which a stream says that it goes on, as proxies cut off those that do not
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
PAGE_HEADERS = {"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY"}
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second is for proxies
ORIGIN_METHODS, ORIGIN_HEADERS = ("GET", "POST"), ("x-request-id", "retry-after")  # for pages of other sites
Parse = Callable[[Any, Served], Call]


@dataclass(frozen=True)
class About:
    """Settings of the server that `/v1/models` lists."""

    num_draft_tokens: int  # drafts of a step; 0 is plain decoding
    verifier: str  # name of the verifier
    chats: bool = False  # whether the page offers a chat


class App:
    """The server as an ASGI application, `outermost`, which holds all the others.

    Args:
        engine: the engine, of this process or of another; it is not closed here.
        served: the model of the engine.
        about: how it is served.
        api_keys: keys of clients; without any, everybody is one.
        request_timeout: seconds that a request may take.
        is_local: whether requests must name this machine as their host, which counts where there are no keys.
        allowed_origins: other sites whose pages may use the server, as browsers name them; "*" is all.

    Attributes:
        outermost: the application to run.
        guard: the application that checks requests.
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
        allowed_origins: Sequence[str] = (),
    ):
        self.engine, self._served, self._about, self._timeout = engine, served, about, request_timeout
        self._started = int(time.time())
        self._metrics, self._turns = ServerMetrics(engine, served.name), Turns()
        self._page = resources.files("specjax.server").joinpath("page.html").read_text(encoding="utf-8")
        handlers = {
            "/": self._show_page,
            "/docs": self._show_docs,
            "/openapi.json": self._describe,
            "/health": self._health,
            "/version": self._version,
            "/metrics": self._write_metrics,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._respond,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/tokenizer_info": self._tokenizer_info,
        }
        listed = operations(served)
        self._description = openapi(listed, bool(api_keys))
        routes = [Route(each.path, handlers[each.path], methods=[each.method]) for each in listed]
        # No response is there, and clients that ask for one are told why.
        routes.append(Route("/v1/responses/{rest:path}", self._find_response, methods=["GET", "DELETE"]))
        routes.append(Route("/v1/responses/{name}/cancel", self._find_response, methods=["POST"]))
        self.routes = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
        self.routes.router.redirect_slashes = False  # a redirection would repeat the header Host
        self.guard = Guard(self.routes, api_keys, is_local=is_local and not api_keys)
        self.outermost: ASGIApp = self.guard
        if allowed_origins:  # browsers ask without a key whether a page may send one
            headers = {"allow_headers": ["*"], "expose_headers": ORIGIN_HEADERS}
            self.outermost = CORSMiddleware(self.guard, allowed_origins, ORIGIN_METHODS, **headers)

    async def _show_page(self, http: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def _show_docs(self, http: HttpRequest) -> Response:
        return HTMLResponse(docs_page(self._description), headers=PAGE_HEADERS)

    async def _describe(self, http: HttpRequest) -> Response:
        return JSONResponse(self._description)

    async def _health(self, http: HttpRequest) -> Response:
        is_well = self.engine.is_running and not self.guard.is_ending
        return JSONResponse({"status": "ok" if is_well else "ending"}, 200 if is_well else 503)

    async def _version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def _write_metrics(self, http: HttpRequest) -> Response:
        return Response(await in_thread(self.metrics), media_type=CONTENT_TYPE)

    def metrics(self) -> bytes:
        """Return the numbers of the server in the text format of Prometheus."""
        return self._metrics.text()

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "specjax",
            "root": self._served.name,
            "max_model_len": self._served.max_length,
            "num_draft_tokens": self._about.num_draft_tokens,
            "verifier": self._about.verifier,
            "chat": self._about.chats,
        }

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._served.names]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if not self._served.is_called(name):
            names = " or ".join(self._served.names)
            raise ApiError(404, f"the only model is {names}", param="model", code="model_not_found")
        return JSONResponse(self._card(name))

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        return JSONResponse(await self._turns.run(http.state.client, lambda: protocol.tokenize(body, self._served)))

    async def _detokenize(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        return JSONResponse(await self._turns.run(http.state.client, lambda: protocol.detokenize(body, self._served)))

    async def _tokenizer_info(self, http: HttpRequest) -> Response:
        return JSONResponse(await in_thread(lambda: tokenizer_info(self._served)))

    async def _completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, protocol.parse_completion, CompletionAnswer)

    async def _chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, protocol.parse_chat, CompletionAnswer)

    async def _respond(self, http: HttpRequest) -> Response:
        return await self._answer(http, responses.parse_response, ResponseAnswer)

    async def _find_response(self, http: HttpRequest) -> Response:
        raise ApiError(404, f"there is no such response: {responses.NOTHING_STORED}", code="not_found")

    async def _message(self, http: HttpRequest) -> Response:
        return await self._answer(http, anthropic.parse_message, MessageAnswer)

    async def _count_tokens(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        return JSONResponse(
            await self._turns.run(http.state.client, lambda: anthropic.count_tokens(body, self._served))
        )

    async def _answer(self, http: HttpRequest, parse: Parse, make: Callable[[Call, Served], Answer]) -> Response:
        """Return the answer to a request, of which `parse` reads the body, in the form that `make` writes."""
        body, start = await read_json(http), time.perf_counter()
        deadline = start + self._timeout
        call, requests = await attended(http.receive, self._begin(body, parse, http.state.client), self._timeout)
        answer, seconds = make(call, self._served), deadline - time.perf_counter()
        try:
            if call.stream:
                events = self._events(call, requests, answer, start)
                first = await attended(http.receive, anext(events), seconds)
                give_up = partial(self._give_up, requests)
                return _EventStream(first, events, deadline - time.perf_counter(), answer, give_up)
            results = await attended(http.receive, self._results(requests, start), seconds)
            return Response(dump(answer.body(results), COMPACT), media_type="application/json")
        except BaseException as error:
            self._give_up(requests)
            if isinstance(error, ValueError) and str(error).startswith("guided_decoding"):  # it does not compile
                raise protocol.bad_parameter(error, call.constraint) from error
            raise

    async def _results(self, requests: Sequence[Pending], start: float) -> list[Result]:
        """Wait for the results of a request that came at `start`."""
        results = list(await asyncio.gather(*(request.wait() for request in requests)))
        for result in results:
            self._metrics.record_result(result, time.perf_counter() - start)
            note_result(result)
        return results

    async def _events(
        self, call: Call, requests: Sequence[Pending], answer: Answer, start: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events that are there at a time, together; with a grammar, not before it is compiled."""
        held = answer.start()
        if call.constraint is None:
            yield held
            held = b""
        last = None
        async for found in arrivals(requests):
            now = time.perf_counter()
            if last is not None:
                self._metrics.record_gap(now - last)
            last = now
            yield held + answer.feed(found)
            held = b""
        yield held + answer.finish(await self._results(requests, start))

    async def _begin(self, body: Any, parse: Parse, client: str) -> tuple[Call, list[Pending]]:
        """Submit the requests of a body."""
        call = await self._turns.run(client, lambda: parse(body, self._served))
        asked = call.params, call.priority, call.cache_salt, client
        submissions = [Submission(prompt, *asked) for prompt in call.prompts]
        try:
            return call, await submit(self.engine, submissions)
        except ValueError as error:
            raise protocol.bad_parameter(error) from error

    def _give_up(self, requests: Sequence[Pending]) -> None:
        cancel(requests)
        self._metrics.record_abort()
        note_end()


class _EventStream(Response):
    """Send events as they come, until the client leaves or the time is over; an error is an event, and the last one.

    Args:
        first: the first events.
        events: those that follow.
        seconds: the time.
        answer: makes the events that tell of an error, and those that say that the stream goes on.
        give_up: is called if they do not come to their end.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncIterator[bytes],
        seconds: float,
        answer: Answer,
        give_up: Callable[[], None],
    ):
        super().__init__(media_type="text/event-stream", headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._first, self._events, self._seconds = first, events, seconds
        self._answer, self._give_up = answer, give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent, turn = time.perf_counter(), asyncio.Lock()

        async def send_part(content: bytes, *, is_last: bool = False) -> None:
            nonlocal sent
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})
            sent = time.perf_counter()

        async def send_pings() -> None:
            while True:
                await asyncio.sleep(max(sent + PING_SECONDS - time.perf_counter(), 0))
                async with turn:  # a client that is slow to read the last events gets nothing after them
                    if time.perf_counter() - sent >= PING_SECONDS:
                        await send_part(self._answer.ping())

        async def send_all() -> None:
            pings = asyncio.ensure_future(send_pings())
            try:
                await send_part(self._first)
                async for content in self._events:
                    if content:
                        async with turn:
                            await send_part(content)
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
            await send_part(b"", is_last=True)

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await attended(receive, send_all(), self._seconds)
        except Disconnected:
            self._give_up()
        except (Exception, asyncio.CancelledError) as error:
            self._give_up()
            async with asyncio.timeout(LAST_WORDS_SECONDS):  # the client may not be reading
                await send_part(self._answer.fail(api_error(error)), is_last=True)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return api_error(error).response(http.scope["path"])


async def _on_leaving(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Answer requests that no route takes."""
    assert isinstance(error, HTTPException), "no other errors come here"
    path = http.scope["path"]
    told = ApiError(error.status_code, f"there is nothing at {path}", code="not_found")
    if error.status_code == 405:
        wrong = f"{path} does not take {http.method}"
        told = ApiError(405, wrong, code="method_not_allowed", headers=error.headers)
    return told.response(path)


_TOLD = ApiError, protocol.BadRequest, NoTokenError, RuntimeError, TimeoutError, concurrent.futures.CancelledError
ERROR_HANDLERS: dict[Any, Callable] = {
    HTTPException: _on_http_error,
    Exception: _on_error,
    Disconnected: _on_leaving,
    **dict.fromkeys(_TOLD, _on_error),
}
