"""Checks of every request before a route: checks of its size, host and key, and whether the server is ending."""

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.server.errors import ApiError, shutting_down

MAX_HEADER_BYTES = 16 * 1024  # of all names and values of headers, and the path
HEALTH = "/health"
OPEN_PATHS = ("/", HEALTH)  # those that need no key
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Guard:
    """Stand before an application and answer requests that must not reach it.

    The path that is checked is the path that is routed: a root path is not known here, and the host only matters where
    it must be this machine. Every path but `OPEN_PATHS` needs a key, whether there is a route or not.

    Args:
        app: the application.
        api_keys: the keys; without any, every request may pass.
        is_local: whether requests must name this machine as their host. It keeps pages of other sites, whose name a
            resolver says is this machine, away from a server without keys.

    Attributes:
        tasks: those that handle a request now.
        is_ending: whether new requests are turned away.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = (), *, is_local: bool = False):
        self._app, self._is_local = app, is_local
        self._keys = [key.encode() for key in api_keys]
        self.tasks: set[asyncio.Task] = set()
        self.is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close"})
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                added = (b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        key = self._key(headers)
        client = f"{address_of(scope.get('client'))} {key}"  # a short name of who asks
        state = {**scope.get("state", {}), "request_id": request_id, "client": client}
        scope = {**scope, "root_path": "", "state": state}
        task = asyncio.current_task()
        assert task is not None, "a server calls an application in a task"
        self.tasks.add(task)
        try:
            self._check(scope, headers, key)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if is_started or not self.is_ending:
                raise
            await shutting_down().response(scope["path"])(scope, receive, send_with_id)
        finally:
            self.tasks.discard(task)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], key: int | None) -> None:
        """Raise ApiError for a request that must not pass."""
        size = len(scope["path"]) + len(scope.get("query_string", b""))
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES:
            raise ApiError(431, f"path and headers must have at most {MAX_HEADER_BYTES} bytes, got {size}")
        if scope["state"].get("is_extra") and scope["path"] != HEALTH:
            headers_of_answer = {"connection": "close", "retry-after": "1"}
            raise ApiError(503, "too many connections", code="too_many_connections", headers=headers_of_answer)
        if self._is_local and _host(headers) not in LOOPBACK:
            raise ApiError(400, "the header Host must name this machine, as the server has no keys and listens on it")
        if scope["path"] not in OPEN_PATHS and self._keys and key is None:
            raise ApiError(
                401,
                "the header Authorization must hold a key of this server: Bearer KEY; or x-api-key the key alone",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self.is_ending and scope["method"] == "POST":
            raise shutting_down()

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """Return which of the keys a request has, or None."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:
            given.append(headers[b"x-api-key"])
        # All of them are compared, whatever matches.
        is_known = [[hmac.compare_digest(key, known) for known in self._keys] for key in given]
        return next((found.index(True) for found in is_known if any(found)), None)


def address_of(client: Sequence[Any] | None) -> str:
    """Return the address of a client as ASGI names it; of an IPv6 address the network, which one client has alone."""
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def _host(headers: dict[bytes, bytes]) -> str:
    """Return the name in the header Host, without the port."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    return re.sub(r":\d*$", "", host)
