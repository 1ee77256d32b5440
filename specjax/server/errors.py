"""Errors as clients of OpenAI know them: a status, and an object with a message, a type, a parameter and a code.

Clients of Anthropic know others; the path of a request tells the protocol of its client.
"""

import asyncio
import concurrent.futures
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from specjax.engine.engine import QueueFull
from specjax.engine.jobs import NoTokenError
from specjax.server.fields import BadRequest

MAX_MESSAGE = 600  # characters
MESSAGES_PATH = "/v1/messages"  # where paths of Anthropic's protocol begin
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error that is told to the client.

    Args:
        status: status of the response.
        message: the fault, in a sentence.
        param: the field of the body that is wrong; None where it is none.
        code: a name that programs may rely on; None where there is none.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The object that the client gets."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": public(self.message), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The object that a client of Anthropic's protocol gets."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": public(self.message)}}

    def response(self, path: str) -> JSONResponse:
        """Return the response to a request of a path."""
        body = self.anthropic_body if is_of_anthropic(path) else self.body
        return JSONResponse(body, self.status, self.headers)


def is_of_anthropic(path: str) -> bool:
    """Return whether clients of Anthropic's protocol ask for a path."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def public(message: str) -> str:
    """Return the message without addresses of objects, of a length that can be read, in characters UTF-8 can encode."""
    message = _ADDRESS.sub("0x...", message).encode("utf-8", "replace").decode()
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."


def shutting_down() -> ApiError:
    """Return the error of a request that comes, or still runs, when the server ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


def api_error(error: BaseException) -> ApiError:
    """Return the answer to the client for an error."""
    match error:
        case ApiError():
            return error
        case BadRequest():
            return ApiError(error.status, error.message, param=error.param, code=error.code)
        case QueueFull():
            return ApiError(429, f"too many requests: {error}", code="queue_full", headers={"retry-after": "1"})
        case NoTokenError():
            return ApiError(400, str(error), code="no_token")  # parameters that forbid all tokens are the usual cause
        case TimeoutError():
            return ApiError(503, "the request took longer than this server allows", code="timeout")
        case asyncio.CancelledError() | concurrent.futures.CancelledError():
            return shutting_down()
    logger.error("a request failed", exc_info=error)
    if type(error) is RuntimeError:  # the engine has failed or is closed
        return ApiError(503, "the engine has failed", code="engine_failed")
    return ApiError(500, "the server made an error", code="internal_error")
