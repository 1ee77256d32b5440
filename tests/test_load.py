"""Loads of the benchmarks: the requests, their times, and the figures that are made of the answers."""

import asyncio
import importlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax.cli import main
from specjax.engine.sizes import SIZES
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.server import loads as load
from specjax.server.client import Client

SCRIPTS = Path(__file__).parent.parent / "scripts"
SOURCE = np.arange(1000)


@pytest.fixture
def script(monkeypatch):
    """Import a script as it runs: beside the others."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_works_are_seeded_and_share_what_they_shall():
    works = load.make_works(50, (10, 20), (3, 5), SOURCE, shared=0.5, seed=1)
    assert works == load.make_works(50, (10, 20), (3, 5), SOURCE, shared=0.5, seed=1)
    assert works != load.make_works(50, (10, 20), (3, 5), SOURCE, shared=0.5, seed=2)
    lengths = [len(work.prompt) for work in works]
    assert {min(lengths), max(lengths)} == {10, 20}
    assert {work.max_tokens for work in works} == {3, 4, 5}
    assert len({work.seed for work in works}) == 50
    longest = max(works, key=lambda work: len(work.prompt)).prompt
    assert all(work.prompt[: round(len(work.prompt) / 2)] == longest[: round(len(work.prompt) / 2)] for work in works)
    assert len({work.prompt[-1] for work in works}) > 10


def test_figures():
    traces = [load.Trace(1.0, [1.5, 1.5001, 2.5], {"num_tokens": 3, "num_drafted": 4, "num_accepted": 1})]
    traces += [load.Trace(2.0, [2.25], {"num_tokens": 1}), load.Trace(3.0, [], {"num_tokens": 0})]
    figures = load.figures(load.Load(traces, 2.0))
    assert (figures["requests"], figures["tokens_per_s"], figures["requests_per_s"]) == (3, 2.0, 1.5)
    assert figures["first_token_s"]["mean"] == 0.375 and figures["first_token_s"]["p50"] == 0.375
    assert figures["between_arrivals_s"]["mean"] == pytest.approx(0.9999)  # two tokens came together
    assert figures["per_token_s"]["p99"] == 0.5
    assert figures["acceptance"] == 0.25
    assert load.load_row({"load": "x"} | figures).startswith("| x | 3 | 2 | 1.50 | 375.0 |")
    assert math.isnan(load.figures(load.Load([], 1.0))["per_token_s"]["mean"])


def test_goodput():
    """A bound is met by the number itself; a request without an answer meets none."""
    traces = [load.Trace(1.0, [1.5, 2.0, 2.5], {"num_tokens": 3}), load.Trace(2.0, [2.25], {"num_tokens": 1})]
    loaded = load.Load([*traces, load.Trace(3.0, [], {"num_tokens": 0})], 2.0)
    cases = {(): 1.0, (0.5,): 1.0, (0.4,): 0.5, (0.5, 0.4): 0.5, (0.5, 0.5): 1.0, (0.5, 0.5, 1.4): 0.5, (0.2,): 0.0}
    for bounds, expected in cases.items():
        assert load.figures(loaded, load.Bounds(*bounds))["goodput"] == expected, bounds
    row = load.load_row({"load": "x"} | load.figures(loaded, load.Bounds()))
    assert row.endswith("| - | - | 1.00 |") and "goodput" not in load.figures(loaded)


@pytest.mark.parametrize("bound", ["ttft", "ttft:0", "ttft:inf", "p99:3", "tpot:x"])
def test_bounds_of_goodput_that_are_refused(bound, capsys):
    assert main(["bench", "--goodput", bound]) == 2
    assert "--goodput must be NAME:MS with a name of ttft, tpot, e2el and MS > 0, got" in capsys.readouterr().err


def test_a_closed_loop_keeps_its_number_under_way():
    running = most = 0

    async def send(work):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(work.max_tokens):
            await asyncio.sleep(0.001)
            yield None
        running -= 1

    works = load.make_works(12, (1, 2), (1, 4), SOURCE)
    result = asyncio.run(load.closed_loop(send, works, 3))
    assert most == 3 and len(result.traces) == 12
    assert sum(trace.counts["num_tokens"] for trace in result.traces) == sum(work.max_tokens for work in works)


def test_poisson_arrivals_wait_for_nobody():
    async def send(work):
        await asyncio.sleep(0.3)
        yield None

    works = load.make_works(60, (1, 2), (1, 1), SOURCE)
    result = asyncio.run(load.poisson(send, works, 300.0, seed=1))
    starts = sorted(trace.start for trace in result.traces)
    assert 0.1 < starts[-1] - starts[0] < 0.5  # 0.2 on average
    assert result.seconds < 1.5


EVENTS = [
    {"choices": [{"text": ""}]},
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "é\n"}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 5},
        "metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 3}},
    },
]


def serve_once(body, status="200 OK", chunk=7):
    """Send a request to a server that answers with these bytes in small chunks; return its trace and the bytes sent."""
    got = {}

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        got.update(head=head, body=json.loads(await reader.readexactly(size)))
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(body), chunk):
            part = body[start : start + chunk]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            send = Client(f"http://127.0.0.1:{port}", "key").sender("small")
            return [item async for item in send(load.Work([1, 2], 5, 7))]

    return asyncio.run(run()), got


def test_a_stream_over_http():
    body = b"".join(b"data: %s\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in EVENTS)
    items, got = serve_once(body + b"data: [DONE]\n\n")
    assert items == [None, None, {"num_tokens": 5, "num_drafted": 6, "num_accepted": 3}]
    assert got["body"]["prompt"] == [1, 2] and got["body"]["stream"] and got["body"]["max_tokens"] == 5
    assert "Authorization: Bearer key\r\n" in got["head"]


def test_errors_over_http():
    with pytest.raises(RuntimeError, match="429 Too Many"):
        serve_once(b'{"error": {}}', "429 Too Many Requests")
    with pytest.raises(RuntimeError, match="broken"):
        serve_once(b'data: {"error": {"message": "broken"}}\n\n')


class TestCommand:
    """`specjax bench`, with a client that measures nothing."""

    @pytest.fixture
    def run(self, monkeypatch, capsys):
        async def send(work):
            yield None
            yield {"num_tokens": work.max_tokens}

        async def model():
            return "small"

        def client(url, api_key):
            return SimpleNamespace(model=model, sender=lambda name: send)

        monkeypatch.setattr("specjax.server.client.Client", client)

        def run(*arguments):
            return main(["bench", *map(str, arguments)]), *capsys.readouterr()

        return run

    def test_rows_of_a_running_server(self, run, tmp_path):
        path = tmp_path / "numbers.json"
        loads = "--concurrency", 2, 4, "--requests", 8, "--outputs", 5, 5
        exit_code, out, _ = run("--url", "http://host:1", *loads, "--json", path)
        assert exit_code == 0 and out.startswith("http://host:1, model small, prompts of [16, 64] tokens")
        rows = json.loads(path.read_text())["rows"]
        assert [row["concurrency"] for row in rows] == [2, 4, None]
        assert [row["requests"] for row in rows] == [4, 8, 8]
        assert rows[1]["tokens_per_s"] == pytest.approx(5 * rows[1]["requests_per_s"])
        assert sum(line.startswith("| closed loop") for line in out.splitlines()) == 2

    def test_a_file_that_cannot_be_written(self, run, tmp_path):
        exit_code, out, err = run("--url", "http://host:1", "--json", tmp_path / "none" / "numbers.json")
        message = f"--json must be a file in a directory that exists, got {tmp_path / 'none' / 'numbers.json'}"
        assert (exit_code, out, err) == (2, "", f"specjax: error: {message}\n")

    def test_a_server_that_it_starts(self, run, monkeypatch):
        started = []

        class Process(SimpleNamespace):
            def __init__(self, command, **options):
                lines = io.StringIO("reading\nspecjax: x is ready at http://127.0.0.1:7\n")
                super().__init__(command=command, stdout=lines, is_ended=False)
                started.append(self)

            def terminate(self):
                self.is_ended = True

            def wait(self):
                return 0

        monkeypatch.setattr("specjax.cli.bench.subprocess.Popen", Process)
        exit_code, out, _ = run("--requests", 1, "--concurrency", 1, "--", "--draft", "ngram")
        assert exit_code == 0 and out.startswith("http://127.0.0.1:7, model small")
        (process,) = started
        assert process.command[-2:] == ["--draft", "ngram"] and process.is_ended

    def test_a_server_that_does_not_start(self, run, monkeypatch):
        process = SimpleNamespace(stdout=io.StringIO("no\n"), terminate=lambda: None, wait=lambda: 2)
        monkeypatch.setattr("specjax.cli.bench.subprocess.Popen", lambda *args, **options: process)
        exit_code, out, err = run()
        assert (exit_code, out) == (2, "")
        assert err.endswith("specjax: error: the server has ended before it was ready, with code 2\n")

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--url", "http://a:1", "--", "--draft", "x"], "--url and arguments of specjax serve exclude each other"),
            (["--concurrency", "0"], "--concurrency must be at least 1, got [0]"),
            (["--prompts", "5", "4"], "--prompts must be FROM TO with FROM <= TO, got 5 4"),
            (["--shared", "2"], "--shared must be in [0, 1], got 2.0"),
            (["--vocab-size", "1"], "--vocab-size must be at least 2, got 1"),
        ],
    )
    def test_wrong_arguments(self, run, arguments, message):
        exit_code, out, err = run(*arguments)
        assert (exit_code, out) == (2, "") and err.startswith(f"specjax: error: {message}")


def test_an_address_of_another_kind():
    with pytest.raises(ValueError, match="url must be http://HOST:PORT, got ftp://a"):
        Client("ftp://a")


def test_the_speed_of_a_full_engine(script):
    looks = [(0.0, 0, 0), (1.0, 5, 1), (2.0, 10, 2), (3.0, 20, 2), (4.0, 30, 2), (5.0, 31, 1)]
    assert script("bench_engine").full_rate(looks) == 10.0
    assert math.isnan(script("bench_engine").full_rate(looks[:2]))


def test_launches_of_a_device(script, monkeypatch):
    def line(name, *spans):
        events = [SimpleNamespace(name=f"of {b - a} ns", start_ns=a, end_ns=b) for a, b in spans]
        return SimpleNamespace(name=name, events=events)

    lines = [
        line("Stream #1", (0, 100_000), (101_000, 150_000)),
        line("Stream #2", (50_000, 120_000), (200_000, 250_000)),
    ]
    planes = [SimpleNamespace(name="/device:GPU:0", lines=[*lines, line("Steps", (0, 250_000))])]
    planes.append(SimpleNamespace(name="/host:CPU", lines=[line("Stream", (0, 10**9))]))
    lists = script("launches")
    launches = lists.of_gpu(SimpleNamespace(planes=planes))
    assert lists.waits_of_device(launches) == pytest.approx({"idle": 0.2, "host_gap": 0.2})
    assert [name for name, *_ in lists.in_order(launches)] == ["of 70000 ns", "of 49000 ns", "of 50000 ns"]
    assert [wait for *_, wait in lists.in_order(launches)] == pytest.approx([-5e-5, -1.9e-5, 5e-5])
    monkeypatch.setattr(lists, "LARGEST", 1)
    (largest, seconds), (every, times) = lists.largest(launches)
    assert (largest, seconds, every) == ("of 100000 ns", [1e-4], "all") and sum(times) == pytest.approx(2.69e-4)


@pytest.mark.slow
def test_every_part_of_the_bench_of_the_engine(script, monkeypatch, capsys, tmp_path):
    """With a model of a few weights; the part of a GPU alone is left out by itself."""
    bench = script("bench_engine")
    monkeypatch.setitem(SIZES, "server", {"gpu": SIZES["server"]["cpu"], "cpu": SIZES["server"]["cpu"]})
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 32}
    config = DecoderConfig(vocab_size=4096, max_length=1024, **sizes)
    monkeypatch.setattr(bench, "load_models", lambda _: [decoder_model(config, init_params(config, i)) for i in (0, 1)])
    # Sizes are such that all engines have the same programs.
    setting = bench.Setting(
        1, 2, (1, 2), (4, 100), (8, 60), ((2, 1, None),), (100, 60), 96, 3, auto=((2, 0.5),), auto_lengths=(100, 60)
    )
    monkeypatch.setitem(bench.SETTINGS, "embedded", setting)
    monkeypatch.setattr(bench, "POLL", 0.002)
    path = tmp_path / "numbers.json"
    named = [part for part in bench.PARTS if part not in ("apart", "kernels")]  # on a CPU, loads and nothing
    monkeypatch.setattr("sys.argv", ["bench_engine", "--json", str(path), "--parts", *named])
    monkeypatch.setattr("sys.stdout.reconfigure", lambda **_: None, raising=False)
    bench.main()
    rows = json.loads(path.read_text())["rows"]
    of_gpus = ["gap"] if jax.default_backend() == "gpu" else []
    parts = ["loads"] * 3 + ["sizes", "full", "static", "auto", "entering", "shared", *of_gpus]
    assert [row["part"] for row in rows] == parts
    assert not any(row["pages_used"] for row in rows)
    assert rows[parts.index("shared")]["num_cached_tokens"] == 64
    assert "| closed loop, 2 | 3 |" in capsys.readouterr().out
