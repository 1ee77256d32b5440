"""Answer requests by replicas of a server in other processes: the work of a replica, and the front of them all."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.server.app import ERROR_HANDLERS, LAST_WORDS_SECONDS
from specjax.server.calls import Disconnected, attended, read_body
from specjax.server.errors import ApiError, api_error
from specjax.server.guard import Guard
from specjax.server.metrics import CONTENT_TYPE
from specjax.server.streams import error_event

REPORT_SECONDS = 10.0  # after which a replica that has said nothing is not well
MAX_TRIES = 2  # so that a request that ends a replica does not end all of them
SCOPE = ("type", "http_version", "method", "scheme", "path", "query_string", "headers")  # its entries for replicas

Ask = Callable[[Scope, bytes], AsyncGenerator[Message, None]]


class ReplicaLost(ApiError):
    """The replica that a request was sent to has ended before the answer did."""

    def __init__(self):
        super().__init__(503, "the replica that answered has ended", code="replica_lost", headers={"retry-after": "1"})


async def replies(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """Yield the messages by which an application answers a request; it is cancelled if they are not read to their end.

    Args:
        app: the application.
        scope: ASGI's description of the request.
        body: its body.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    given = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message = next(given, None)
        return await asyncio.Future() if message is None else message

    async def call() -> None:
        await app(scope, receive, messages.put)

    task = asyncio.create_task(call())
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Front:
    """Send requests to replicas, as an ASGI application.

    A request whose replica ends before any of the answer has been sent goes to another one, once. After that the client
    gets an error: an object, or the last event of a stream.

    Args:
        ask: sends a request to one of the replicas: a function of the scope and the body that yields the messages of
            the answer, as `replies` makes them, and raises `ReplicaLost`.
        api_keys: keys of clients; without any, everybody is one.
        request_timeout: seconds that a request may take, those in which it waits for a replica among them.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        api_keys: Sequence[str] = (),
        request_timeout: float = 600.0,
    ):
        self._ask, self._timeout = ask, request_timeout
        self._reports: dict[str, tuple[float, str]] = {}  # by replica: the time of its report, and the report
        routes = [Route("/health", self._health), Route("/metrics", self._metrics), Mount("", self._forward)]
        self._guard = Guard(Starlette(routes=routes, exception_handlers=ERROR_HANDLERS), api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the prefix under which the front is mounted is no part of the path
            scope = {**scope, "path": scope["path"].removeprefix(scope.get("root_path", "")) or "/"}
        await self._guard(scope, receive, send)

    def report(self, replica: str, metrics: str) -> None:
        """Take a replica's word that it is well, with its numbers; it counts for `REPORT_SECONDS`.

        Args:
            replica: name of the replica.
            metrics: its numbers in the text format of Prometheus.
        """
        self._reports[replica] = time.monotonic(), metrics

    def _fresh(self) -> dict[str, str]:
        oldest = time.monotonic() - REPORT_SECONDS
        self._reports = {name: report for name, report in self._reports.items() if report[0] >= oldest}
        return {name: metrics for name, (_, metrics) in self._reports.items()}

    async def _health(self, http: HttpRequest) -> Response:
        is_well = bool(self._fresh())
        return JSONResponse({"status": "ok" if is_well else "no replica"}, 200 if is_well else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(merged(self._fresh()), media_type=CONTENT_TYPE)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            body = await read_body(receive)
            told = {name: scope[name] for name in SCOPE} | {"client": scope.get("client")}
            await attended(receive, self._ask_some(told, body, reply), self._timeout)
        except Disconnected:
            return
        except Exception as error:
            told = api_error(error)
            if not reply.is_complete:  # an application that makes an error tells the client before it raises
                async with asyncio.timeout(LAST_WORDS_SECONDS):  # the client may not be reading
                    await reply.fail(told, scope, receive)

    async def _ask_some(self, scope: Scope, body: bytes, reply: "_Reply") -> None:
        """Pass on the answer of a replica; where that is lost before it began, of another one."""
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                async with aclosing(self._ask(scope, body)) as messages:
                    async for message in messages:
                        await reply.pass_on(message)
                if reply.is_complete:
                    return
                raise ReplicaLost
            except ReplicaLost:
                if reply.is_started or not tries_left:
                    raise


class _Reply:
    """Answer to a client: streams go out as they come, other answers when whole, so that errors can replace them.

    Attributes:
        is_started: whether something has been sent.
        is_complete: whether the end has been sent.
    """

    def __init__(self, send: Send):
        self._send = send
        self._held: list[Message] = []
        self._is_stream = False
        self.is_started = self.is_complete = False

    async def pass_on(self, message: Message) -> None:
        """Take a message of an answer."""
        if message["type"] == "http.response.start":
            self._held = [message]  # held parts of an answer that was lost go
            self._is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            return
        self._held.append(message)
        is_last = not message.get("more_body", False)
        if self._is_stream or is_last:
            held, self._held = self._held, []
            self.is_started = True
            for each in held:
                await self._send(each)
            self.is_complete = is_last

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """End with an error."""
        if self.is_started:
            last = error_event(error, scope["path"])
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await error.response(scope["path"])(scope, receive, self._send)


def merged(texts: Mapping[str, str]) -> str:
    """Return numbers of several replicas as one text for Prometheus, where the label `replica` tells them apart.

    Args:
        texts: the text of each replica, by its name; every sample has some label.
    """
    families: dict[str, list[str]] = {}
    for replica, text in texts.items():
        for family in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
            head, kind, *samples = family.splitlines(keepends=True)
            lines = [sample.replace("{", f'{{replica="{replica}",', 1) for sample in samples]
            families.setdefault(head + kind, []).extend(lines)
    return "".join(head + "".join(lines) for head, lines in families.items())
