#!/usr/bin/env python3
"""Load replicas of the embedded family under Ray Serve, and kill one of them meanwhile.

    scripts/load_replicas.py --replicas 2 --requests 200

It starts a separate Ray on this machine. Every request is seeded, so its text is known: each answer must be that
text, or an error object, or a stream that ends with an error event. Then Ray must have replaced the replica that was
killed, all requests must succeed again, and no slot may be in use.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from fault_server import ask, head
from ray import serve

from specjax.server.ray import application

NUM_TEXTS = 8  # different requests
MAX_TOKENS = 96
SECONDS_TO_RECOVER = 120.0


def body_of(number: int) -> dict[str, Any]:
    """Return one of the requests, every other a stream."""
    seed = number // 2 % NUM_TEXTS
    sent = {"model": "specjax", "prompt": "def add(a, b):", "max_tokens": MAX_TOKENS, "seed": seed, "ignore_eos": True}
    return sent | {"stream": number % 2 == 1}


async def answer_to(port: int, number: int) -> tuple[str, str]:
    """Send a request, and return its outcome: a word, and the text or the fault."""
    sent = json.dumps(body_of(number)).encode()
    try:
        answer = await ask(port, head("POST", "/v1/completions", len(sent)) + sent)
    except (TimeoutError, IndexError, OSError) as error:
        return "wrong", f"no answer: {error!r}"
    assert answer is not None
    status, content = answer
    try:
        if status != 200:
            error = json.loads(content)["error"]
            return f"error object {status} {error['code']}", ""
        if not content.startswith(b"data:"):
            return "answer", json.loads(content)["choices"][0]["text"]
        events = re.findall(rb"^data: (.*)$", content, re.MULTILINE)
        if events[-1] == b"[DONE]":
            return "answer", "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return f"error event {json.loads(events[-1])['error']['code']}", ""
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return "wrong", f"{error!r} in {content[-300:]!r}"


async def load(
    port: int, num_requests: int, num_clients: int, texts: list[str], kill: Callable[[], None] | None = None
):
    """Send requests, `kill` when a third of them have been sent, print the outcomes, and return the faults."""
    numbers, outcomes, wrong, last_error = iter(range(num_requests)), Counter(), [], 0.0
    start, slowest = time.monotonic(), 0.0

    async def client() -> None:
        nonlocal kill, last_error, slowest
        for number in numbers:
            if kill is not None and number >= num_requests // 3:
                kill, act = None, kill
                act()
            began = time.monotonic()
            word, text = await answer_to(port, number)
            slowest = max(slowest, time.monotonic() - began)
            if word == "answer" and text != texts[number // 2 % NUM_TEXTS]:
                word, text = "wrong", f"another text: {text!r}"
            if word == "wrong":
                wrong.append(f"request {number}: {text}")
            if word != "answer":
                last_error = time.monotonic() - start
            outcomes[word] += 1

    await asyncio.gather(*(client() for _ in range(num_clients)))
    seconds = time.monotonic() - start
    speed = outcomes["answer"] * MAX_TOKENS / seconds
    print(f"{num_requests} requests in {seconds:.1f} s, {speed:.0f} tokens/s: {dict(outcomes)}; the slowest took")
    print(f"{slowest:.1f} s, the last error came after {last_error:.1f} s", flush=True)
    return wrong


async def check_idle(port: int) -> list[str]:
    """Return the resources that are still in use some time after the last request."""
    found: list[str] = []
    for _ in range(50):
        answer = await ask(port, head("GET", "/metrics", 0))
        assert answer is not None
        samples = re.findall(rb"^specjax:(?:num_requests_running|num_requests_waiting).*$", answer[1], re.MULTILINE)
        found = [sample.decode() for sample in samples if not sample.endswith(b" 0.0")]
        if samples and not found:
            return []
        await asyncio.sleep(0.2)
    return [f"still in use: {found}"]


def wait_for_replicas(process_ids: Callable[[], list[int]], number: int) -> float:
    """Return the seconds until there are so many replicas."""
    start = time.monotonic()
    while len(process_ids()) < number:
        if time.monotonic() - start > SECONDS_TO_RECOVER:
            raise TimeoutError(f"{len(process_ids())} of {number} replicas after {SECONDS_TO_RECOVER:g} s")
        time.sleep(0.5)
    return time.monotonic() - start


def run(port: int, args: argparse.Namespace) -> list[str]:
    """Run the loads and return their faults."""
    replicas = serve.get_deployment_handle("Replica", "load")

    def process_ids() -> list[int]:
        found = replicas.broadcast("process_id").results(timeout_s=10, return_exceptions=True)
        return [each for each in found if isinstance(each, int)]

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        print(f"killed the replica of process {victim}", flush=True)

    async def first_texts() -> list[str]:
        answers = [await answer_to(port, 2 * i) for i in range(NUM_TEXTS)]
        assert all(word == "answer" for word, _ in answers), answers
        return [text for _, text in answers]

    texts, sizes = asyncio.run(first_texts()), (port, args.requests, args.clients)
    wrong = asyncio.run(load(*sizes, texts))
    victim = process_ids()[0]
    wrong += asyncio.run(load(*sizes, texts, kill))
    print(f"all replicas are there again after another {wait_for_replicas(process_ids, args.replicas):.1f} s")
    wrong += asyncio.run(load(*sizes, texts))
    return wrong + asyncio.run(check_idle(port))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200, help="of each of the three loads")
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(num_cpus=args.replicas + 1, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        started = time.monotonic()
        replicas = application(
            num_replicas=args.replicas, num_slots=4, max_length=256, resources={"num_cpus": 1, "num_gpus": 0}
        )
        serve.run(replicas, name="load")
        print(f"{args.replicas} replicas are ready after {time.monotonic() - started:.0f} s", flush=True)
        try:
            wrong = run(port, args)
        finally:
            serve.shutdown()
            ray.shutdown()
    print("\n".join(wrong[:50]) or "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
