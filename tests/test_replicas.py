"""The front of replicas: answers pass through whole, and a replica that ends is another one's work or a clear error."""

import asyncio
import importlib
import json
import re
import sys
from types import SimpleNamespace

import pytest

from specjax.server import replicas
from specjax.server.errors import ApiError
from specjax.server.replicas import Front, ReplicaLost, merged, replies
from specjax.validation.extras import install_command

EVENT = b'data: {"choices":[]}\n\n'


def head(content_type, status=200):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}


def part(content, is_last=False):
    return {"type": "http.response.body", "body": content, "more_body": not is_last}


WHOLE = [head(b"application/json"), part(b"{}", True)]
STREAM = [head(b"text/event-stream; charset=utf-8"), part(EVENT), part(EVENT), part(b"", True)]


class Replicas:
    """Replicas whose answers are given, with an exception where one ends so."""

    def __init__(self, *scripts):
        self.scripts, self.asked, self.closed = iter(scripts), [], 0

    async def ask(self, scope, body):
        self.asked.append((scope, body))
        try:
            for each in next(self.scripts):
                if isinstance(each, Exception):
                    raise each
                if each is None:
                    await asyncio.Future()
                yield each
        finally:
            self.closed += 1


def call(front, path="/v1/completions", *, body=b"{}", leaves=False, headers=(), root_path=""):
    """Return the status, headers and body of the answer to a request; the client may leave after its body."""

    async def run():
        parts = iter([{"type": "http.request", "body": body[:1], "more_body": True}, {"body": body[1:], "type": ""}])
        sent = []

        async def receive():
            message = next(parts, None)
            if message is None:
                await (asyncio.sleep(0.01) if leaves else asyncio.Future())
                return {"type": "http.disconnect"}
            return message

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST" if body else "GET", "scheme": "http"}
        scope |= {"path": root_path + path, "root_path": root_path, "query_string": b"", "headers": list(headers)}
        async with asyncio.timeout(10):
            await front(scope, receive, send)
        return sent

    sent = asyncio.run(run())
    if not sent:
        return None
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    assert leaves or not sent[-1].get("more_body"), "the answer has no end"
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


def front_of(*scripts, **options):
    found = Replicas(*scripts)
    return found, Front(found.ask, **options)


class TestFront:
    @pytest.mark.parametrize("script, content", [(WHOLE, b"{}"), (STREAM, 2 * EVENT)])
    def test_an_answer_passes_through(self, script, content):
        found, front = front_of(script)
        assert call(front, body=b'{"a": 1}')[::2] == (200, content)
        ((scope, body),) = found.asked
        assert (scope["path"], body) == ("/v1/completions", b'{"a": 1}')

    @pytest.mark.parametrize(
        "lost", [[ReplicaLost()], [STREAM[0], ReplicaLost()], [WHOLE[0], part(b"{"), ReplicaLost()], []]
    )
    def test_a_replica_that_ends_before_the_answer_begins(self, lost):
        found, front = front_of(lost, STREAM)
        assert call(front)[::2] == (200, 2 * EVENT)
        assert len(found.asked) == 2 and found.asked[0] == found.asked[1]

    def test_a_request_that_ends_every_replica(self):
        found, front = front_of(*[[ReplicaLost()]] * 9)
        status, headers, body = call(front)
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert json.loads(body)["error"]["code"] == "replica_lost"
        assert len(found.asked) == 2

    @pytest.mark.parametrize("lost", [[ReplicaLost()], []])
    def test_a_replica_that_ends_in_a_stream(self, lost):
        found, front = front_of([*STREAM[:2], *lost], STREAM)
        status, _, body = call(front)
        assert status == 200 and body.startswith(EVENT)
        assert json.loads(body.removeprefix(EVENT).removeprefix(b"data: "))["error"]["code"] == "replica_lost"
        assert len(found.asked) == 1  # another replica would begin again

    def test_clients_of_anthropic_know_another_error(self):
        _, front = front_of([*STREAM[:2], ReplicaLost()], *[[ReplicaLost()]] * 2)
        name, data = call(front, "/v1/messages")[2].removeprefix(EVENT).split(b"\n", 1)
        whole = call(front, "/v1/messages")[2]
        assert (name, json.loads(data.removeprefix(b"data: "))) == (b"event: error", json.loads(whole))
        assert json.loads(whole)["error"]["type"] == "api_error"

    def test_an_error_after_the_end(self):
        """An application raises an error that it has told the client already; the client is not told a second time."""
        _, front = front_of([head(b"application/json", 500), part(b"{}", True), TypeError("broken")])
        assert call(front)[::2] == (500, b"{}")

    def test_an_answer_without_content(self):
        _, front = front_of([{"type": "http.response.start", "status": 204, "headers": []}, part(b"", True)])
        assert call(front)[::2] == (204, b"")

    def test_too_many_requests(self):
        _, front = front_of([ApiError(429, "too many requests", code="queue_full", headers={"retry-after": "1"})])
        status, headers, body = call(front)
        assert (status, headers[b"retry-after"], json.loads(body)["error"]["type"]) == (429, b"1", "rate_limit_error")

    def test_time_is_over(self):
        found, front = front_of([None], request_timeout=0.05)
        status, _, body = call(front)
        assert (status, json.loads(body)["error"]["code"], found.closed) == (503, "timeout", 1)

    @pytest.mark.parametrize("script", [[None], [*STREAM[:2], None]])
    def test_a_client_that_leaves(self, script):
        found, front = front_of(script)
        call(front, leaves=True)
        assert found.closed == 1

    def test_a_body_too_long(self, monkeypatch):
        monkeypatch.setattr("specjax.server.calls.MAX_BODY_BYTES", 10)
        found, front = front_of()
        assert call(front, body=b"x" * 11)[0] == 413
        assert not found.asked

    def test_keys_and_prefixes(self):
        found, front = front_of(WHOLE, api_keys=["secret"])
        assert call(front, root_path="/llm")[0] == 401
        assert call(front, "/health", body=b"", root_path="/llm")[0] == 503  # it needs no key
        assert not found.asked
        assert call(front, root_path="/llm", headers=[(b"authorization", b"Bearer secret")])[0] == 200
        assert found.asked[0][0]["path"] == "/v1/completions"

    def test_reports_of_replicas(self, monkeypatch):
        now = 100.0
        monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now))
        _, front = front_of()
        assert call(front, "/health", body=b"")[::2] == (503, b'{"status":"no replica"}')
        front.report("a", METRICS)
        now += replicas.REPORT_SECONDS - 1
        front.report("b", METRICS)
        assert call(front, "/health", body=b"")[::2] == (200, b'{"status":"ok"}')
        assert call(front, "/metrics", body=b"")[2].decode() == merged({"a": METRICS, "b": METRICS})
        now += 2
        assert call(front, "/metrics", body=b"")[2].decode() == merged({"b": METRICS})


METRICS = """\
# HELP x:running Running.
# TYPE x:running gauge
x:running{model_name="m"} 1.0
# HELP x:time_seconds Seconds.
# TYPE x:time_seconds histogram
x:time_seconds_bucket{le="1.0",model_name="m"} 2.0
x:time_seconds_sum{model_name="m"} 3.0
"""


def test_numbers_of_several_replicas():
    text = merged({"a": METRICS, "b": METRICS})
    assert text.count("# HELP x:running") == text.count("# TYPE x:time_seconds") == 1
    families = re.split("(?=# HELP)", text)[1:]
    assert [sorted(re.findall('replica="(.)"', family)) for family in families] == [["a", "b"], ["a", "a", "b", "b"]]
    assert 'x:time_seconds_bucket{replica="b",le="1.0",model_name="m"} 2.0\n' in families[1]


class TestReplies:
    def test_what_an_application_sends(self):
        async def app(scope, receive, send):
            message = await receive()
            await send(head(b"text/plain"))
            await send(part(message["body"] + scope["path"].encode(), not message["more_body"]))

        async def run():
            return [message async for message in replies(app, {"path": "/x"}, b"body ")]

        assert asyncio.run(run()) == [head(b"text/plain"), part(b"body /x", True)]

    def test_an_application_that_fails(self):
        async def app(scope, receive, send):
            await send(head(b"text/plain"))
            raise ValueError("broken")

        async def run():
            return [message async for message in replies(app, {}, b"")]

        with pytest.raises(ValueError, match="broken"):
            asyncio.run(run())

    def test_nobody_reads_to_the_end(self):
        left = []

        async def app(scope, receive, send):
            try:
                await receive()
                await send(head(b"text/plain"))
                await receive()  # until the client leaves
            except asyncio.CancelledError:
                left.append("cancelled")
                raise

        async def run():
            messages = replies(app, {}, b"")
            await anext(messages)
            await messages.aclose()

        asyncio.run(run())
        assert left == ["cancelled"]


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "specjax.server.ray", raising=False)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("ray", "ray"))):
        importlib.import_module("specjax.server.ray")
    assert replicas  # which needs no Ray


@pytest.fixture
def module():
    pytest.importorskip("ray.serve", exc_type=ImportError)
    return importlib.import_module("specjax.server.ray")


class TestApplication:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"num_slots": "8"}, "num_slots must be an integer, got '8'"),
            ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
            ({"name": 3}, "name must be a string or a list of strings, got 3"),
            ({"name": []}, "name must be a string or a list of strings, got []"),
            ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
            ({"max_waiting": 0}, "max_waiting must be at least 1, got 0"),
            ({"verifier": "greedy"}, "verifier must be one of rejection, block, match, typical, got 'greedy'"),
            ({"api_keys": [""]}, "api_key must be"),
            ({"api_keys": "secret"}, "api_keys must be a list of strings"),
            ({"api_keys": [12345]}, "api_keys must be a list of strings"),
            ({"shutdown_timeout": "30"}, "shutdown_timeout must be a number, got '30'"),
            ({"request_timeout": 0}, "request_timeout must be positive"),
        ],
    )
    def test_wrong_arguments(self, module, arguments, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            module.build(arguments)

    def test_an_option_that_is_none(self, module):
        with pytest.raises(TypeError, match="max_lenght"):
            module.application(max_lenght=64)
