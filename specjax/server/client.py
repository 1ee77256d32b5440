"""A client of OpenAI's protocol over plain HTTP, which sends the requests of a load to any server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from specjax.server.loads import Send, Work

TEMPERATURE = 0.8


class Client:
    """Send requests to a server.

    Args:
        url: of the server, http://HOST:PORT.
        api_key: the server's bearer token, or None.

    Raises:
        ValueError: the address is another one.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"url must be http://HOST:PORT, got {url}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def lines(self, method: str, path: str, body: Any = None) -> AsyncIterator[str]:
        """Yield the lines of an answer as they come.

        Raises:
            RuntimeError: the answer is an error.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            about = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            writer.write(f"{method} {path} HTTP/1.1\r\n{self._headers}{about}\r\n".encode() + content)
            await writer.drain()
            status = (await reader.readline()).decode()
            head = await reader.readuntil(b"\r\n\r\n")
            is_chunked = b"transfer-encoding: chunked" in head.lower()
            if " 200 " not in status:
                raise RuntimeError(f"{status.strip()}: {(await reader.read(2000)).decode(errors='replace')}")
            rest = b""
            async for data in _chunks(reader) if is_chunked else _pieces(reader):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    yield line.decode().strip()
            yield rest.decode().strip()
        finally:
            writer.close()

    async def model(self) -> str:
        """Return the name of the first model of the server."""
        text = "".join([line async for line in self.lines("GET", "/v1/models")])
        return json.loads(text)["data"][0]["id"]

    def sender(self, model: str) -> Send:
        """Return the function that sends a request of a load as a stream."""

        async def send(work: Work) -> AsyncIterator[dict[str, int] | None]:
            body = {"model": model, "prompt": work.prompt, "max_tokens": work.max_tokens, "seed": work.seed}
            body |= {"temperature": TEMPERATURE, "ignore_eos": True, "stream": True}
            async for line in self.lines("POST", "/v1/completions", body | {"stream_options": {"include_usage": True}}):
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                if event.get("usage"):
                    yield counts_of(event)
                elif any(choice.get("text") for choice in event["choices"]):
                    yield None

        return send


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(2**16):
        yield data


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a body in chunked transfer coding."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


def counts_of(event: dict[str, Any]) -> dict[str, int]:
    """Return the counts of tokens in the last event of a stream, with counts of drafts where the server sends them."""
    counts = {"num_tokens": event["usage"]["completion_tokens"]}
    drafts = (event.get("metrics") or {}).get("speculative_decoding")
    if drafts:
        counts |= {"num_drafted": drafts["num_draft_tokens"], "num_accepted": drafts["num_accepted_draft_tokens"]}
    return counts
