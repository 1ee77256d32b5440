"""The command `specjax bench`: a server of OpenAI's protocol under load, a running one or one that it starts."""

import argparse
import asyncio
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.cli.terminal import check_file

if TYPE_CHECKING:
    from specjax.server.loads import Bounds, Load, Send, Work

UTILISATION = 0.7  # of the capacity of the largest loop, for Poisson arrivals
SOURCE = 200_000  # random token ids that prompts are pieces of
BOUNDS = {"ttft": "first_token", "tpot": "per_token", "e2el": "whole"}  # names of other tools for fields of `Bounds`

logger = logging.getLogger(__name__)


def add_bench(commands: Any) -> None:
    """Add the command `specjax bench`."""
    bench = commands.add_parser(
        "bench",
        help="measure a server under load",
        description="Measure a server of OpenAI's protocol, a running one at --url, or one that is started with the "
        "arguments after --, as specjax serve takes them. The load is requests of mixed lengths as streams of "
        "/v1/completions, in closed loops and with Poisson arrivals at 70 % of the capacity of the largest loop, or "
        "at --rates. "
        "Prompts are random token ids, so that every server gets the same work.",
    )
    bench.set_defaults(run=_bench, command="bench", extra="serve")
    add = bench.add_argument
    add(
        "serve", nargs="*", metavar="SERVE", help="after --: arguments of specjax serve, for the server that is started"
    )
    add("--url", help="a running server, http://HOST:PORT; default: start one")
    add("--name", help="name of the model; default: the first one of /v1/models")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="default: OPENAI_API_KEY")
    add("--requests", type=int, default=64, metavar="N", help="requests of the largest loop; default: 64")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="requests under way; default: 1 4 8")
    lengths: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("FROM", "TO")}
    add("--prompts", default=[16, 64], help="tokens of a prompt; default: 16 64", **lengths)
    add("--outputs", default=[32, 128], help="tokens of an answer; default: 32 128", **lengths)
    add(
        "--shared",
        type=float,
        default=0.0,
        metavar="X",
        help="share of each prompt that all have in common; default: 0",
    )
    add("--rates", type=float, nargs="+", default=[], metavar="X", help="Poisson arrivals a second")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="also count requests a second within these bounds: ttft:MS to the first token, tpot:MS a token after it, "
        "e2el:MS for the answer",
    )
    add("--vocab-size", type=int, default=4000, metavar="N", help="token ids of prompts are smaller; default: 4000")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to a file")


def _bench(args: argparse.Namespace) -> int:
    """Run `specjax bench` and return its exit code."""
    from specjax.server.client import Client
    from specjax.server.loads import COLUMNS, header, make_works

    _check(args)
    bounds = _bounds(args.goodput)
    columns = COLUMNS if bounds is None else (*COLUMNS, "within bounds, requests/s")
    source = np.random.default_rng(0).integers(1, args.vocab_size, SOURCE)
    works = make_works(args.requests, tuple(args.prompts), tuple(args.outputs), source, shared=args.shared)
    with _server(args) as url:
        client = Client(url, args.api_key)
        try:
            name = args.name or asyncio.run(client.model())
            print(f"{url}, model {name}, prompts of {args.prompts} tokens, answers of {args.outputs}.")
            print(f"\n{header(columns)}")
            rows = _rows(client.sender(name), works, args.concurrency, args.rates, bounds)
        except RuntimeError as error:
            raise ValueError(f"the server at {url} refuses a request: {error}") from error
    if args.json is not None:
        about = {"url": url, "model": name, "serve": args.serve}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for an argument that is out of its range."""
    if args.serve and args.url is not None:
        raise ValueError(f"--url and arguments of specjax serve exclude each other, got {args.url} and {args.serve}")
    for name in ("requests", "concurrency", "prompts", "outputs", "vocab_size"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("prompts", "outputs"):
        least, most = getattr(args, name)
        if least > most:
            raise ValueError(f"--{name} must be FROM TO with FROM <= TO, got {least} {most}")
    if args.vocab_size < 2:
        raise ValueError(f"--vocab-size must be at least 2, got {args.vocab_size}")
    if not all(0 < rate < math.inf for rate in args.rates):
        raise ValueError(f"--rates must be positive and finite, got {args.rates}")
    if not 0 <= args.shared <= 1:
        raise ValueError(f"--shared must be in [0, 1], got {args.shared}")
    if args.json is not None:
        check_file("json", args.json)


def _bounds(given: Sequence[str]) -> "Bounds | None":
    """Return the bounds of goodput, None for none."""
    from specjax.server.loads import Bounds

    found = {}
    for bound in given:
        name, _, number = bound.partition(":")
        try:
            seconds = float(number) / 1000
        except ValueError:
            seconds = math.nan
        if name not in BOUNDS or not 0 < seconds < math.inf:
            raise ValueError(f"--goodput must be NAME:MS with a name of {', '.join(BOUNDS)} and MS > 0, got {bound!r}")
        found[BOUNDS[name]] = seconds
    return Bounds(**found) if found else None


def _rows(
    send: "Send",
    works: "Sequence[Work]",
    concurrency: Sequence[int],
    rates: Sequence[float],
    bounds: "Bounds | None",
) -> list[dict[str, Any]]:
    """Run the loads, print the row of each when it has ended, and return the rows."""
    from specjax.server.loads import closed_loop, figures, load_row

    asyncio.run(closed_loop(send, works[:1], 1))  # the server has compiled its programs
    rows = []

    def run(about: str, some: "Sequence[Work]", number: int | None, rate: float = math.nan) -> float:
        row = {"load": about, "concurrency": number} | figures(_measure(send, some, number, rate), bounds)
        rows.append(row)
        print(load_row(row), flush=True)
        return row["requests_per_s"]

    capacity = math.nan
    for number in concurrency:
        some = works[: max(2 * number, len(works) * number // max(concurrency))]
        capacity = run(f"closed loop, {number}", some, number)
    for rate in rates or (UTILISATION * capacity,):
        run(f"Poisson, {rate:.2f} a second", works, None, rate)
    return rows


def _measure(send: "Send", works: "Sequence[Work]", concurrency: int | None, rate: float) -> "Load":
    """Run a load: a closed loop, or at a rate where `concurrency` is None."""
    from specjax.server.loads import closed_loop, poisson

    return asyncio.run(poisson(send, works, rate) if concurrency is None else closed_loop(send, works, concurrency))


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Give the address of the server, which is started and ended here where the arguments name none."""
    if args.url is not None:
        yield args.url
        return
    told = ["-q"] if args.quiet else []
    command = [sys.executable, "-m", "specjax", "serve", "--port", "0", "--no-access-log", *told, *args.serve]
    logger.info("starting %s", " ".join(command[1:]))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "it was asked for"
    try:
        found = (re.search(r"is ready at (http://\S+)", line) for line in process.stdout)
        ready = next((match for match in found if match), None)
        if ready is None:
            raise ValueError(f"the server has ended before it was ready, with code {process.wait()}")
        yield ready[1]
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()
