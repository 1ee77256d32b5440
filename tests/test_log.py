"""Lines of the server's log: who waits for them, what they say, and when there are some on the load."""

import asyncio
import io
import math
import re
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

from specjax.engine.engine import Stats
from specjax.engine.pages import PageStats
from specjax.server import log
from specjax.server.log import AccessLog, Lines, load_line, note_result, watch_load

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d "


class SlowFile(io.StringIO):
    """A file whose reader does not read at first."""

    def __init__(self):
        super().__init__()
        self.is_read = threading.Event()

    def write(self, text):
        self.is_read.wait(60)
        return super().write(text)


class TestLines:
    def test_time_and_order(self):
        lines = Lines(file := io.StringIO())
        for i in range(3):
            lines.write(f"line {i}")
        lines.close()
        assert re.fullmatch("".join(f"{TIME}line {i}\n" for i in range(3)), file.getvalue())

    def test_nobody_waits_for_a_slow_reader(self, monkeypatch):
        monkeypatch.setattr(log, "MAX_LINES", 4)
        lines = Lines(file := SlowFile())
        for i in range(20):
            lines.write(f"line {i}")
        file.is_read.set()
        lines.close()
        written = file.getvalue().splitlines()
        (lost,) = (int(line.split()[0]) for line in written if "were left out" in line)
        assert lost == 20 - (len(written) - 1) >= 15

    def test_no_file(self):
        lines = Lines(None)
        lines.write("to nowhere")
        lines.close()

    def test_closed_file(self):
        file = io.StringIO()
        file.close()
        lines = Lines(file)
        lines.write("to nowhere")
        lines.close()
        assert not lines._thread.is_alive()


def result(num_tokens=10, num_steps=4, num_drafted=12, length=2.5, first=0.5, num_prompt=3):
    metrics = SimpleNamespace(
        num_tokens=num_tokens,
        num_steps=num_steps,
        num_drafted=num_drafted,
        mean_acceptance_length=length,
        time_to_first_token=first,
    )
    return SimpleNamespace(metrics=metrics, num_prompt_tokens=num_prompt)


def ask(path="/v1/completions", status=200, results=(), client=("192.0.2.7", 5), error=None):
    """Return the lines of one request to an application that gives these results."""
    lines = []

    async def app(scope, receive, send):
        for each in results:
            await asyncio.create_task(note_in_task(each))
        if error is not None:
            raise error
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"a-1")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def note_in_task(each):
        note_result(each)

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": path, "client": client, "query_string": b"key=secret"}
    asyncio.run(AccessLog(app, lines.append)(scope, None, send))
    return lines


class TestRequests:
    def test_one_prompt(self):
        (line,) = ask(results=[result()])
        expected = "192.0.2.7 POST /v1/completions 200 prompt_tokens=3 generated_tokens=10 first_token_seconds=0.500 "
        assert re.fullmatch(re.escape(f"{expected}acceptance_length=2.50 ") + r"seconds=\d\.\d{3} id=a-1", line)

    def test_several_prompts(self):
        """The mean acceptance length is that over all steps, and the first token is the first of all."""
        results = [result(), result(num_steps=12, length=4.5, first=0.25), result(num_drafted=0, length=math.nan)]
        (line,) = ask(results=results)
        assert "prompt_tokens=9 generated_tokens=30 first_token_seconds=0.250 acceptance_length=4.00 " in line

    def test_without_drafts_and_tokens(self):
        (line,) = ask(results=[result(num_tokens=0, num_drafted=0, length=math.nan, first=math.nan)])
        assert "nan" not in line and "generated_tokens=0 seconds=" in line

    @pytest.mark.parametrize(
        "path, shown", [("/a\nb c", "/a%0Ab%20c"), ("/é\x1b[2J", "/%C3%A9%1B%5B2J"), ("/" + "x" * 900, "/" + "x" * 199)]
    )
    def test_paths_cannot_forge_lines(self, path, shown):
        (line,) = ask(path, 404)
        assert line.startswith(f"192.0.2.7 POST {shown} 404 seconds=") and "secret" not in line

    @pytest.mark.parametrize("path, status, number", [("/health", 200, 0), ("/metrics", 200, 0), ("/health", 503, 1)])
    def test_paths_of_machines(self, path, status, number):
        assert len(ask(path, status)) == number

    def test_no_client_and_no_answer(self):
        lines = []
        log_of = AccessLog(failing, lines.append)
        with pytest.raises(ValueError):
            asyncio.run(log_of({"type": "http", "method": "GET", "path": "/", "client": None}, None, None))
        assert re.fullmatch(r"- GET / - seconds=\d\.\d{3}", *lines)

    def test_results_outside_of_requests(self):
        note_result(result())  # as in an application without a log


async def failing(scope, receive, send):
    raise ValueError


def stats(num_tokens=0, num_running=0, num_waiting=0, num_drafts=0, num_accepted=0, pages=None):
    counts = {"num_drafts": num_drafts, "num_drafted": 4 * num_drafts, "num_accepted": num_accepted}
    return Stats(num_running, num_waiting, 0, num_tokens, 0, pages, **counts)


class TestLoad:
    def test_line(self):
        before = stats(num_tokens=100, num_drafts=10, num_accepted=10)
        now = stats(
            500,
            8,
            3,
            110,
            230,
            PageStats(num_used=30, num_cached=10, num_free=60, num_query_tokens=0, num_hit_tokens=0),
        )
        expected = "load tokens_per_second=40.0 acceptance_length=3.20 acceptance_rate=0.55 running=8 waiting=3 "
        assert load_line(before, now, 10.0) == expected + "pages=30/100"

    def test_line_without_drafts_and_pages(self):
        assert load_line(stats(), stats(5, 1), 2.0) == "load tokens_per_second=2.5 running=1 waiting=0"

    def test_nothing_while_idle(self):
        """A line comes where something runs, waits, or has run since the last look; an engine that fails ends it."""
        seen = iter([stats(), stats(), stats(num_waiting=1), stats(7, 1), stats(9), stats(9)])

        def next_stats():
            for each in seen:
                return each
            raise RuntimeError("the engine has failed")

        lines = []
        asyncio.run(watch_load(SimpleNamespace(stats=next_stats), lines.append, seconds=0.001))
        loads = [re.sub(r"second=\S+", "second=.", line) for line in lines]
        assert loads == [f"load tokens_per_second=. running={r} waiting={w}" for r, w in [(0, 1), (1, 0), (0, 0)]]
