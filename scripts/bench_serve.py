"""Measure a server of OpenAI's protocol under load: `specjax serve`, or any other, over plain HTTP.

    specjax serve --port 8000 &
    python scripts/bench_serve.py --url http://127.0.0.1:8000
    python scripts/bench_serve.py --url http://127.0.0.1:8000 --concurrency 1 8 64 --prompts 256 768 --outputs 128 384

The load and the table are the same as in `bench_engine.py`: requests of mixed lengths as streams of /v1/completions, in
closed loops and with Poisson arrivals at 70 % of the capacity of the largest loop. Prompts are random token ids, so
that every server gets the same work. The clients take a core of their own where the server leaves one.
`random_checkpoint.py` writes a model of real size for a server.
"""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from load import Load, Send, Work, closed_loop, figures, header, load_row, make_works, poisson

UTILISATION, TEMPERATURE = 0.7, 0.8  # of the capacity, for Poisson arrivals; of sampling
SOURCE = 200_000  # random token ids that prompts are pieces of


class Client:
    """Send requests to a server.

    Args:
        url: of the server, http://HOST:PORT.
        api_key: the server's bearer token, or None.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise SystemExit(f"--url must be http://HOST:PORT, got {url}")
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


def measure(send: Send, works: list[Work], concurrency: int | None, rate: float) -> Load:
    """Run a load: a closed loop, or at a rate where `concurrency` is None."""
    if concurrency is None:
        return asyncio.run(poisson(send, works, rate))
    return asyncio.run(closed_loop(send, works, concurrency))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="name of the model; default: the first one of /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, nargs=2, default=[16, 64], metavar=("FROM", "TO"), help="tokens")
    parser.add_argument("--outputs", type=int, nargs=2, default=[32, 128], metavar=("FROM", "TO"), help="tokens")
    parser.add_argument("--shared", type=float, default=0.0, help="share of each prompt that all have in common")
    parser.add_argument("--vocab-size", type=int, default=4000, help="token ids of prompts are smaller")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    client = Client(args.url, args.api_key)
    name = args.model or asyncio.run(client.model())
    source = np.random.default_rng(0).integers(1, args.vocab_size, SOURCE)
    works = make_works(args.requests, tuple(args.prompts), tuple(args.outputs), source, shared=args.shared)
    send = client.sender(name)
    asyncio.run(closed_loop(send, works[:1], 1))  # the server has compiled its programs
    print(f"{args.url}, model {name}, prompts of {args.prompts} tokens, answers of {args.outputs}.\n\n{header()}")
    rows, rate = [], math.nan
    for concurrency in (*args.concurrency, None):
        if concurrency is None:
            about, some = f"Poisson, {UTILISATION * rate:.2f} a second", works
        else:
            about = f"closed loop, {concurrency}"
            some = works[: max(2 * concurrency, len(works) * concurrency // max(args.concurrency))]
        row = {"load": about} | figures(measure(send, some, concurrency, UTILISATION * rate))
        rate = row["requests_per_s"]
        rows.append(row)
        print(load_row(row))
    if args.json:
        args.json.write_text(json.dumps({"url": args.url, "model": name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
