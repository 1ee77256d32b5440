"""An engine and an application that speak to each other through a socket, as the two processes of a server do."""

import asyncio
import json
import math
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, zip_longest

import pytest
from test_protocol import TEMPLATE
from test_tokenizer import make_tokenizer

from specjax import Capacities, Engine, SamplingParams, guided, proposers
from specjax.engine.engine import QueueFull
from specjax.engine.requests import Metrics
from specjax.engine.scheduler import NoTokenError
from specjax.processes.child import read_frame

pytest.importorskip("uvicorn")

from test_server import (
    MAX_LENGTH,
    MAX_WAITING,
    NUM_SLOTS,
    VOCAB_SIZE,
    Client,
    chat,
    completion,
    is_running,
    make_model,
    running,
    wait_until_idle,
)

from specjax.server import http_process, wire
from specjax.server.app import About, App
from specjax.server.desk import Desk
from specjax.server.remote import RemoteEngine
from specjax.server.served import Served

VOLATILE = "id", "created"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Served("small", make_tokenizer(), VOCAB_SIZE, MAX_LENGTH, (2,), directory, fingerprint="fp_1")


def make_engine(served):
    return Engine(
        make_model(0),
        proposers.ngram(2),
        num_slots=NUM_SLOTS,
        max_length=MAX_LENGTH,
        page_size=16,
        chunk_size=16,
        tokenizer=served.tokenizer,
        eos_token_ids=served.eos_token_ids,
        capacities=Capacities(bad_words=4, bad_word_length=4, grammars=1),
        max_waiting=MAX_WAITING,
    )


@pytest.fixture(scope="module")
def engine(served):
    with make_engine(served) as engine:
        yield engine


@contextmanager
def through_a_desk(engine, served, **options):
    """A server whose application has an engine behind a desk: a client of it, and the socket of the desk."""
    ours, theirs = socket.socketpair()
    about = {"num_draft_tokens": 2, "verifier": "rejection"}
    setup = {"served": wire.write_served(served), "about": about, "options": options, "shutdown_timeout": 5.0}
    setup["access_log"] = False
    is_ready = threading.Event()
    with ours, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        speaker = threading.Thread(target=lambda: asyncio.run(http_process.serve(theirs, listener)))
        desk = Desk(ours, setup)
        host = threading.Thread(target=desk.serve, args=(engine, is_ready.set))
        speaker.start()
        host.start()
        assert is_ready.wait(60)
        try:
            yield Client(port, None), ours
        finally:
            desk.end()
            speaker.join()
            host.join()


@pytest.fixture(scope="module")
def client(engine, served):
    with through_a_desk(engine, served) as (client, _):
        yield client


@pytest.fixture(scope="module")
def direct(engine, served):
    with running(engine, served) as client:
        yield client


def compared(body):
    """A body without what no two answers share, or that depends on what was asked before."""
    if "usage" in body:
        body["usage"].pop("prompt_tokens_details")
    return {name: value for name, value in body.items() if name not in VOLATILE}


WHOLE = {
    "several samples": ("completions", completion(prompt=["the cat", "the dog"], n=2, logprobs=2, seed=3)),
    "the best of several": ("completions", completion(n=2, best_of=4, seed=5)),
    "scores of a prompt": ("completions", completion(echo=True, logprobs=1, max_tokens=2)),
    "parameters": (
        "completions",
        completion(
            temperature=0.9, frequency_penalty=0.3, logit_bias={"7": 2, "299": 3.5}, bad_words=["dog"], max_tokens=24
        ),
    ),
    "a stop string": ("completions", completion(stop=["a", "e"], max_tokens=60, ignore_eos=False)),
    "a grammar": ("completions", completion(guided_regex="[ab]{3}", ignore_eos=False)),
    "a chat": ("chat/completions", chat(logprobs=True, top_logprobs=2)),
    "an unknown field": ("completions", completion(no_such_field=1)),
    "a grammar that does not compile": ("completions", completion(guided_regex="(a")),
    "more than the engine can hold": ("completions", completion(bad_words=["x"] * 60)),
}


class TestAnswers:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", WHOLE)
    def test_same_as_in_one_process(self, client, direct, name):
        path, body = WHOLE[name]
        expected, found = (each.call("POST", f"/v1/{path}", body) for each in (direct, client))
        assert found[0] == expected[0]
        assert compared(found[2]) == compared(expected[2])

    @pytest.mark.slow
    def test_streams(self, client, direct):
        body = completion(stream=True, logprobs=2, n=2, max_tokens=30, stream_options={"include_usage": True})
        texts, tokens = [], []
        for each in (direct, client):
            *events, last, done = each.events("/v1/completions", body)
            assert done == "[DONE]" and last["usage"]["completion_tokens"] == 60
            choices = [[event["choices"][0] for event in events if event["choices"][0]["index"] == i] for i in (0, 1)]
            texts.append(["".join(choice["text"] for choice in sample) for sample in choices])
            tokens.append([])
            for sample in choices:
                lists = [choice["logprobs"] for choice in sample if choice["logprobs"]]
                tokens[-1].append({name: list(chain(*(each[name] for each in lists))) for name in lists[0]})
        assert texts[0] == texts[1]
        assert tokens[0] == tokens[1] and len(tokens[0][0]["tokens"]) == 30

    @pytest.mark.slow
    def test_kinds_of_tokens(self, client):
        body = completion(prompt="the cat the cat", stream=True, return_token_kinds=True, max_tokens=40)
        *events, _ = client.events("/v1/completions", body)
        kinds = [kind for event in events for kind in event["choices"][0].get("token_kinds", ())]
        assert len(kinds) == 40 and {"recovered", "target"} <= set(kinds)

    def test_metrics_are_of_both_sides(self, client, engine):
        client.complete()
        numbers, stats = client.numbers(), engine.stats()
        assert float(numbers["generation_tokens_total"]) == stats.num_tokens > 0
        assert float(numbers["prefix_cache_queries_total"]) == stats.pages.num_query_tokens
        assert float(numbers["e2e_request_latency_seconds_count"]) >= 1

    def test_clients_that_leave(self, client, engine):
        before = engine.stats().num_tokens
        for stream in (True, False):
            connection = client.send("POST", "/v1/completions", completion(max_tokens=180, stream=stream, n=2))
            assert is_running(engine)
            connection.sock.close()
            connection.close()
            wait_until_idle(engine)
        assert engine.stats().num_tokens - before < 2 * 2 * 180

    def test_too_many_requests(self, client, engine):
        before = engine.stats().num_tokens
        many = completion(prompt=[[5]] * (MAX_WAITING + 60), max_tokens=180)
        status, headers, body = client.call("POST", "/v1/completions", many)
        assert (status, headers["retry-after"], body["error"]["code"]) == (429, "1", "queue_full")
        wait_until_idle(engine)
        assert engine.stats().num_tokens - before < 180 * MAX_WAITING  # where one is refused, none runs

    def test_the_engine_learns_who_asks(self, client, engine, monkeypatch):
        names = []
        monkeypatch.setattr(engine._compiler, "is_full", lambda name: names.append(name) or True)
        status, _, body = client.call("POST", "/v1/completions", completion(guided_regex="a"))
        assert (status, body["error"]["code"], names) == (429, "queue_full", ["127.0.0.1 None"])


class TestLosses:
    def test_everything_that_waits_fails(self):
        engine = RemoteEngine(lambda data: None)
        requests = [engine.submit([5], SamplingParams()) for _ in range(2)]
        engine.receive(b'[["entered", 0, null]]')
        engine.lose()
        with pytest.raises(RuntimeError, match="the engine has failed"):
            requests[0].result(timeout=1)
        with pytest.raises(RuntimeError, match="the engine has failed"):
            asyncio.run(asyncio.wait_for(requests[1].entered(), 1))
        with pytest.raises(RuntimeError, match="the engine has failed"):
            engine.submit([5], SamplingParams())
        assert not engine.is_running

    def test_the_channel_breaks(self, engine, served):
        with through_a_desk(engine, served) as (client, channel):
            events = client.events("/v1/completions", completion(max_tokens=180, n=16, stream=True))
            next(events)
            channel.shutdown(socket.SHUT_RDWR)
            assert list(events)[-1]["error"]["code"] == "engine_failed"
        wait_until_idle(engine)

    def test_the_engine_fails(self, served, monkeypatch):
        with make_engine(served) as engine, through_a_desk(engine, served) as (client, _):

            def fail(*args, **options):
                raise ZeroDivisionError("the device is lost at 0x7f1234567890")

            monkeypatch.setattr(engine._scheduler._device, "step", fail)
            status, _, body = client.call("POST", "/v1/completions", completion())
            assert (status, body["error"]["message"]) == (503, "the engine has failed")
            for _ in range(200):  # the server ends by itself
                try:
                    client.call("GET", "/health")
                except ConnectionError:
                    return
                time.sleep(0.05)
            raise AssertionError("the server goes on without its engine")


def test_a_slow_process_gets_fewer_frames(engine):
    """And the engine does not wait for it."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(30)
    with ours, theirs, theirs.makefile("rb") as file:
        desk = Desk(ours, {})
        host = threading.Thread(target=desk.serve, args=(engine, lambda: None))
        host.start()
        params = SamplingParams(seed=1, ignore_eos=True, max_tokens=150, logprobs=20)
        for number in range(3):
            theirs.sendall(wire.write_submission(number, [5, 6], params, 0, "", None))
        before = engine.stats().num_finished
        for _ in range(1000):
            if engine.stats().num_finished - before == 3:
                break
            time.sleep(0.01)
        assert engine.stats().num_finished - before == 3  # nobody has read anything
        assert json.loads(read_frame(file)) == {}
        found, num_steps, num_frames = {number: [] for number in range(3)}, [], 0
        while len(num_steps) < 3:
            num_frames += 1
            for kind, number, content in json.loads(read_frame(file)):
                if kind == "pieces":
                    found[number] += content
                if kind == "result":
                    num_steps.append(Metrics(*content[1]).num_steps)
        assert [len(pieces) for pieces in found.values()] == [150] * 3
        assert num_frames < max(num_steps) / 3
        theirs.shutdown(socket.SHUT_RDWR)
        host.join()


def test_tokens_that_have_come_are_one_event(served):
    """However many steps they are of."""
    sent, numbers = [], []

    class Channel(RemoteEngine):
        def submit(self, *args, **options):
            request = super().submit(*args, **options)
            numbers.append(request._number)
            return request

    engine = Channel(lambda data: None)
    app = App(engine, served, About(0, "rejection"))
    body = json.dumps(completion(stream=True, logprobs=0, max_tokens=3)).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    scope |= {"scheme": "http", "headers": [(b"content-type", b"application/json")], "server": None, "client": None}
    given = [{"type": "http.request", "body": body, "more_body": False}]

    def tell(*news):
        engine.receive(json.dumps([[kind, numbers[0], content] for kind, content in news]).encode())

    async def receive():
        return given.pop() if given else await asyncio.Future()

    async def send(message):
        sent.append(message.get("body"))

    async def call():
        task = asyncio.create_task(app.guard(scope, receive, send))
        while not numbers:
            await asyncio.sleep(0.01)
        tell(("entered", None))
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        for token in (5, 6, 7):
            tell(("pieces", [[f"{token}", token, "target", 0, {str(token): -0.5}]]))
        metrics = [3, 3, 0, 0, math.nan, [], math.nan, 1.0, 3.0, math.nan, 0.5, math.nan]
        tell(("result", [[[0, "length", None]], metrics, None, 2, 0]))
        await task

    asyncio.run(call())
    events = [json.loads(each.removeprefix("data: ")) for each in b"".join(sent[1:]).decode().split("\n\n")[:-2]]
    first, last = (event["choices"][0] for event in events)
    assert (first["text"], first["logprobs"]["token_logprobs"]) == ("567", [-0.5] * 3)
    assert (last["text"], last["finish_reason"]) == ("", "length")


class TestWire:
    def test_results(self, engine):
        """The result is the engine's result, but for the prompt."""
        params = SamplingParams(n=2, best_of=3, seed=4, max_tokens=20, logprobs=2, prompt_logprobs=1, stop="e")
        request = engine.submit("the cat", params)
        expected = request.result(timeout=60)
        of_samples = [[piece for piece in request if piece.index == i] for i in range(3)]
        pieces = [piece for several in zip_longest(*of_samples) for piece in several if piece]  # as steps give them
        sent = json.loads(json.dumps([pieces, wire.write_result(expected)]))
        found = wire.read_result(sent[1], [wire.read_piece(piece) for piece in sent[0]])
        assert [wire.read_piece(piece) for piece in sent[0]] == pieces
        assert found.completions == expected.completions
        assert repr(tuple(found.metrics)) == repr(tuple(expected.metrics))  # some are NaN
        assert found._replace(pieces=expected.pieces)[3:] == expected[3:]

    def test_stats(self, engine):
        stats = engine.stats()
        assert wire.read_stats(json.loads(json.dumps(wire.write_stats(stats)))) == stats

    @pytest.mark.parametrize(
        "error, kind",
        [
            (QueueFull("9 wait"), QueueFull),
            (CancelledError("over"), CancelledError),
            (ValueError("no"), ValueError),
            (NoTokenError("none"), NoTokenError),
            (RuntimeError("the engine has failed"), RuntimeError),
            (NotImplementedError("odd"), Exception),
        ],
    )
    def test_errors(self, error, kind):
        found = wire.read_error(json.loads(json.dumps(wire.write_error(error))))
        assert (type(found), str(found)) == (kind, str(error))
        assert (found.__cause__ is None) == (kind in (QueueFull, CancelledError, ValueError, NoTokenError))

    def test_submissions(self):
        params = SamplingParams(logit_bias={7: 2.5}, stop=["a", "b"], guided_decoding=guided.Regex("a|b"), seed=2**63)
        data = wire.write_submission(3, [5, 2**31 - 1], params, -2, "s", "192.0.2.7 0")
        kind, number, prompt, found, *others = wire.read_question(data[8:])
        assert (kind, number, prompt.tolist(), found) == ("submit", 3, [5, 2**31 - 1], params)
        assert others == [-2, "s", "192.0.2.7 0"]

    def test_models(self, served):
        served = replace(served, aliases=("other",), takes_any_name=True)
        found = wire.read_served(json.loads(json.dumps(wire.write_served(served))))
        assert (found.names, found.takes_any_name) == (served.names, True)
        assert found.tokenizer.to_str() == served.tokenizer.to_str()
        assert found.directory == served.directory and found.token_text(5) == served.token_text(5)


@pytest.mark.slow
def test_no_device_is_opened():
    """The imports of the process that speaks HTTP open no device."""
    code = "import specjax.server.http_process, jax._src.xla_bridge as x; print(x.backends_are_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
