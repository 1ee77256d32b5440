#!/usr/bin/env python3
"""Send a server thousands of random requests, good and bad ones, from clients that leave at any time.

    scripts/fault_server.py --requests 10000

It starts `specjax serve` with the embedded family. Bodies are complete, cut off, random bytes, or have extreme fields.
A known request is repeated between them and must always get the same answer. In the end no request may be
without an answer, no answer an error of the server, no slot or page in use, and memory must not have grown.

Then one client tries to hold the server up in several ways, one after the other, and another one must be answered.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

NUM_CLIENTS = 24
MANY = 5000  # connections, more than the server takes
SECONDS = 120.0  # in which an answer must have come
KNOWN = {"model": "specjax", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0.8, "seed": 7}
EXTREMES = [None, True, False, 0, -1, 1, 2, 10**9, 10**400, -(2**63), 0.0, 1e-300, 1e300, -1e9, "", "x", "\ud800"]
EXTREMES += ["\0", "a" * 10_000, [], [[]], [None], [-1], ["x"] * 1000, {}, {"a": {}}, {"1": 1e9}, {"-1": 1}]
FIELDS = """
    max_tokens n best_of temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty
    min_tokens logprobs priority prompt stop stop_token_ids logit_bias bad_words allowed_token_ids stream echo user
    model stream_options guided_regex guided_json guided_choice response_format ignore_eos suffix no_such_field messages
""".split()  # noqa: SIM905
PATTERNS = ["[0-9]{3}", "(a+)+b", "(", "a|b|c", "(a|b)*a(a|b){10}", "", "\\d", "[^a]*"]
STATUSES = {200, 400, 404, 405, 408, 413, 415, 429, 431, 503}  # the statuses that a server may answer
Answer = tuple[int, bytes]


def head(method: str, path: str, size: int, content_type: str = "application/json") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-type: {content_type}"]
    return "\r\n".join([*lines, f"content-length: {size}", "", ""]).encode()


def good_body(rng: random.Random) -> dict[str, Any]:
    """A request that succeeds, with some parameters."""
    body: dict[str, Any] = {
        "model": "specjax",
        "prompt": "def f(x):"[: rng.randint(1, 9)],
        "max_tokens": rng.randint(1, 24),
    }
    body |= {"temperature": rng.choice([0, 0.5, 1, 2]), "stream": rng.random() < 0.5}
    if rng.random() < 0.3:
        body |= {"n": rng.randint(1, 4), "temperature": 1}
    if rng.random() < 0.3:
        body["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.3:
        body |= {"presence_penalty": rng.uniform(-2, 2), "repetition_penalty": rng.uniform(0.5, 2), "stop": ["\n", "x"]}
    if rng.random() < 0.1:
        body |= {"prompt": [rng.randrange(500) for _ in range(rng.randint(1, 150))], "max_tokens": 20}
    if rng.random() < 0.05:
        body |= {"guided_regex": rng.choice(PATTERNS)}
    return body


def bad_body(rng: random.Random) -> dict[str, Any]:
    """A request with fields of values that make no sense, or only just do."""
    body = good_body(rng)
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = rng.choice(EXTREMES)
    if rng.random() < 0.1:
        body[rng.choice(FIELDS)] = json.loads('{"a":' * 200 + "1" + "}" * 200)
    return body


def content_of(rng: random.Random) -> tuple[str, bytes]:
    """The kind and the bytes of a request."""
    kind = rng.choices(["good", "bad", "bytes", "cut", "garbage", "route"], [50, 25, 5, 5, 5, 10])[0]
    path = "/v1/completions"
    if kind in ("good", "bad", "cut"):
        sent = json.dumps(bad_body(rng) if kind == "bad" else good_body(rng)).encode()
    else:
        sent = rng.randbytes(rng.randint(0, 2000))
    if kind == "garbage":
        return kind, sent + b"\r\n\r\n"
    if kind == "cut":
        return kind, head("POST", path, len(sent)) + sent[: rng.randrange(len(sent))]
    if kind == "route":
        routes = [
            "/",
            "/health",
            "/v1/models",
            "/metrics",
            "/version",
            "/tokenize",
            "/v1/chat/completions",
            "/%00",
            "//",
        ]
        return kind, head(rng.choice(["GET", "POST", "PUT", "HEAD"]), rng.choice(routes), len(sent)) + sent
    return kind, head("POST", path, len(sent)) + sent


async def ask(port: int, content: bytes, leaves_after: float | None = None) -> Answer | None:
    """Return the status and the body of an answer, None where the client leaves before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write(content)
        await writer.drain()
        if leaves_after is not None:
            await asyncio.sleep(leaves_after)
            return None
        answer = await asyncio.wait_for(reader.read(-1), SECONDS)
    finally:
        writer.close()
    first, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in first.lower():
        body = b"".join(part for part in re.split(rb"\r?\n?[0-9a-f]+\r\n", body) if part)
    return int(first.split()[1]), body


def problem_of(kind: str, sent: bytes, answer: Answer) -> str | None:
    """Return the fault of an answer, None without one."""
    status, body = answer
    if status not in STATUSES:
        return f"status {status}"
    is_error = status != 200 and kind != "garbage" and not sent.startswith(b"HEAD")
    if is_error and (b'{"error":' not in body or re.search(rb"Traceback|0x[0-9a-f]{6}", body)):
        return f"an error without its object: {body[:200]!r}"
    if kind == "good" and body.startswith(b"data:") and not body.rstrip().endswith((b"[DONE]", b"0")):
        return f"a stream without its end: {body[-200:]!r}"
    if kind == "good" and status not in (200, 429) and b"guided" not in sent:
        return f"status {status} for a good request: {body[:200]!r}"
    return None


async def known_text(port: int) -> str:
    sent = json.dumps(KNOWN).encode()
    while True:
        answer = await ask(port, head("POST", "/v1/completions", len(sent)) + sent)
        assert answer is not None
        if answer[0] == 200:
            return json.loads(answer[1])["choices"][0]["text"]
        assert answer[0] == 429, answer
        await asyncio.sleep(0.2)


async def attack(port: int, num_requests: int, seed: int, pids: list[int]) -> list[str]:
    """Send the requests, print the outcomes, and return the faults."""
    expected, statuses, wrong = await known_text(port), Counter(), []
    numbers, memory = iter(range(num_requests)), []

    async def client() -> None:
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            kind, sent = content_of(rng)
            leaves = kind == "cut" or rng.random() < 0.2
            try:
                answer = await ask(port, sent, rng.uniform(0, 0.3) if leaves else None)
            except (TimeoutError, IndexError, OSError) as error:
                if kind != "garbage":
                    wrong.append(f"request {number} ({kind}) has no answer: {error!r}")
                continue
            statuses["left" if answer is None else answer[0]] += 1
            if answer is not None and (problem := problem_of(kind, sent, answer)):
                wrong.append(f"request {number} ({kind}): {problem}")
            if number % 50 == 0 and (text := await known_text(port)) != expected:
                wrong.append(f"beside request {number} the known request gets {text!r}, alone {expected!r}")
            if number % max(1, num_requests // 20) == 0:
                memory.append(resident_mib(pids))
                print(f"{number} requests, {memory[-1]} MiB", flush=True)

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    print(f"{num_requests} requests in {time.monotonic() - start:.0f} s: {dict(sorted(statuses.items(), key=str))}")
    wrong += await check_idle(port)
    half = memory[len(memory) // 2 :]
    print(f"memory in the second half: {min(half)} to {max(half)} MiB; at the end {resident_mib(pids)} MiB")
    if resident_mib(pids) > 1.05 * half[0]:
        wrong.append(f"memory grew from {half[0]} to {resident_mib(pids)} MiB in the second half")
    return wrong


async def hold(port: int, address: str, content: bytes, number: int) -> list[asyncio.StreamWriter]:
    """Open connections from an address of this machine, send something on each, and read nothing."""
    opened = []
    for _ in range(number):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), limit=1024)
            writer.write(content)
            opened.append(writer)
        except OSError:  # the server refuses or closes it, as it may
            await asyncio.sleep(0)
    return opened


def post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return head("POST", "/v1/completions", len(content)) + content


async def seconds_of(port: int, content: bytes) -> float:
    """Return how long a request takes that must succeed."""
    start = time.monotonic()
    answer = await ask(port, content)
    assert answer is not None and answer[0] == 200, answer
    return time.monotonic() - start


async def hold_up(port: int) -> list[str]:
    """Hold the server up from one address in several ways, and return where another one is not answered in time."""
    costly = [post(KNOWN | {"guided_regex": f"(a|b)*a(a|b){{{18 + i}}}"}) for i in range(8)]
    unread = post({"model": "specjax", "prompt": "x", "max_tokens": 200, "n": 4, "stream": True, "logprobs": 5})
    long = post({"model": "specjax", "prompt": "x" * 10**6, "max_tokens": 1})
    ways = {
        "nothing is sent": [b""] * MANY,
        "half a header": [b"GET /health HTTP/1.1\r\nhost: loc"] * MANY,
        "half a body": [head("POST", "/v1/completions", 100) + b"{"] * MANY,
        "streams that nobody reads": [unread] * 200,
        "costly grammars": costly,
        "long prompts": [long] * 100,
        "many requests on a connection": [head("GET", "/metrics", 0).replace(b"close", b"keep-alive") * 1000] * 20,
        "requests that leave": [post(KNOWN | {"max_tokens": 100})] * 500,
    }
    wrong = []
    for way, contents in ways.items():
        held = [
            writer
            for content in set(contents)
            for writer in await hold(port, "127.0.0.2", content, contents.count(content))
        ]
        if way == "requests that leave":
            for writer in held:
                writer.transport.abort()
        await asyncio.sleep(0.5)
        times = []
        for name, content in {
            "health": head("GET", "/health", 0),
            "a completion": post(KNOWN),
            "a grammar": post(KNOWN | {"guided_regex": f"[a-z]{{{len(wrong) + len(way)}}}", "max_tokens": 4}),
        }.items():
            try:
                times.append(f"{name} {await seconds_of(port, content):.2f} s")
            except (AssertionError, TimeoutError, OSError, IndexError) as error:
                wrong.append(f"{way}: {name} gets {error!r}")
        print(f"{way}, {len(held)} times: {', '.join(times)}", flush=True)
        for writer in held:
            writer.transport.abort()
        await asyncio.sleep(1)
    return wrong + await check_idle(port)


async def check_idle(port: int) -> list[str]:
    """Return the resources that are still in use some time after the last request."""
    used: dict[str, float] = {}
    for _ in range(100):
        answer = await ask(port, head("GET", "/metrics", 0))
        assert answer is not None
        names = rb"num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        found = re.findall(rb"specjax:(" + names + rb')\{model_name="specjax"\} (\S+)', answer[1])
        used = {name.decode(): float(value) for name, value in found}
        if len(used) == 3 and not any(used.values()):
            print("no slot and no page is in use")
            return []
        await asyncio.sleep(0.2)
    return [f"still in use: {used}"]


def resident_mib(pids: list[int]) -> int:
    """The memory of processes together."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) for status in statuses) // 1024


def with_children(pid: int) -> list[int]:
    """A process and those that it has started."""
    parents = {
        int(path.parent.name): path.read_text().rpartition(") ")[2] for path in Path("/proc").glob("[0-9]*/stat")
    }
    return [pid, *(child for child, about in parents.items() if int(about.split()[1]) == pid)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    command = [sys.executable, "-m", "specjax", "serve", "--port", "0", "--max-length", "256", "--num-slots", "8"]
    with subprocess.Popen(
        [*command, "--max-waiting", "20", "--request-timeout", "60", "--no-access-log"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            wrong = asyncio.run(attack(port, args.requests, args.seed, with_children(server.pid)))
            wrong += asyncio.run(hold_up(port))
            server.terminate()
            if server.wait(timeout=60) != 0:
                wrong.append(f"the server ended with {server.returncode}")
        finally:
            server.kill()
    print("\n".join(wrong[:50]) or "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
