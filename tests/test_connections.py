"""Connections that clients hold: how long they may wait, and who gets a place where there are too many."""

import asyncio
import http.client
import json
import select
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

from specjax.server import connections
from specjax.server.calls import attended
from specjax.server.connections import Connection
from specjax.server.guard import Guard, address_of
from specjax.server.run import Server

LARGE = b"x" * 2**24  # more than the sockets of both sides keep


class Application:
    """Answers with a short text, with much, without an end, or when the test says so."""

    def __init__(self):
        self.num_waiting, self.go_on = 0, threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/wait":
            self.num_waiting += 1
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
        if scope["path"] == "/attended":
            await attended(receive, asyncio.sleep(0.001), 20)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": LARGE, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": LARGE if scope["path"] == "/large" else b"fine"})


@contextmanager
def running():
    """A server of such an application: its port, its connections, and the application."""
    application = Application()
    guard = Guard(application)
    app = SimpleNamespace(outermost=guard, guard=guard, engine=SimpleNamespace(is_running=True))
    server = Server(app, 0.0, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1], server.server_state.connections, application
        finally:
            application.go_on.set()
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.fixture
def connect():
    """A function that connects with a port, and sends something. The connections end with the test."""
    with ExitStack() as stack:

        def connect(port, sent=b""):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # small, so that much stays at the server
            connection.settimeout(20)
            connection.connect(("127.0.0.1", port))
            connection.sendall(sent)
            return connection

        yield connect


def head(path, more=b"", method=b"GET"):
    return method + b" /" + path + b" HTTP/1.1\r\nhost: localhost\r\n" + more + b"\r\n"


def ask(port, path="/"):
    """The status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def is_ended(connection):
    """Whether the server ends a connection. It is not when nothing comes for the time that sockets have here."""
    with suppress(ConnectionError):
        while connection.recv(2**16):
            pass
    return True


def is_answered(connection):
    content = b""
    while b"fine" not in content and (part := connection.recv(2**16)):
        content += part
    return b"fine" in content


class TestTime:
    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"GET / HT",
            head(b"")[:-2],
            head(b""),
            head(b"") + b"GET / HT",
            head(b"", b"content-length: 9\r\n", b"POST") + b"half",
        ],
        ids=["nothing", "a word", "half a header", "no second request", "half a second request", "half a body"],
    )
    def test_a_connection_without_a_request_ends(self, sent, connect, monkeypatch):
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
        with running() as (port, _, _):
            assert is_ended(connect(port, sent))

    def test_a_header_that_comes_byte_by_byte(self, connect, monkeypatch):
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
        with running() as (port, _, _):
            connection = connect(port)
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    connection.sendall(b"G")
                    time.sleep(0.02)

    def test_a_request_that_takes_longer(self, connect, monkeypatch):
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
        with running() as (port, _, application):
            busy = connect(port, head(b"wait"))
            wait_for(lambda: application.num_waiting)
            assert is_ended(connect(port))  # which came later
            application.go_on.set()
            assert is_answered(busy)

    @pytest.mark.parametrize("path", [b"large", b"endless"])
    def test_an_answer_that_is_not_read(self, path, connect, monkeypatch):
        monkeypatch.setattr(connections, "READER_SECONDS", 0.2)
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
        with running() as (port, live, _):
            connect(port, head(path))
            wait_for(lambda: live)
            wait_for(lambda: not live)

    def test_an_answer_that_is_read_slowly(self):
        """It goes on as long as enough of it is taken between two looks."""
        calls, sizes, ended = [], [300_000, 200_000, 100_000, 99_999], []
        connection = object.__new__(Connection)
        connection.transport = SimpleNamespace(
            get_write_buffer_size=lambda: sizes[0], abort=lambda: ended.append(sizes[0])
        )
        connection.loop = SimpleNamespace(call_later=lambda seconds, *call: calls.append(call))
        connection._watch_reader()
        while calls:
            check, before = calls.pop()
            del sizes[0]
            check(before)
        assert ended == [99_999]

    def test_requests_far_ahead_of_their_answers(self, connect):
        """A client that reads its answers, so that the server goes on."""
        with running() as (port, _, _):
            connection, num_sent = connect(port), 0
            connection.setblocking(False)
            with pytest.raises(ConnectionError):
                while num_sent < 2**25:
                    can_read, can_write, _ = select.select([connection], [connection], [], 20)
                    if can_write:
                        num_sent += connection.send(head(b"attended") * 2000)
                    if can_read and not connection.recv(2**20):
                        raise ConnectionError


class TestPlaces:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr(connections, "MAX_CONNECTIONS", 6)
        monkeypatch.setattr(connections, "MAX_CONNECTIONS_OF_ADDRESS", 4)
        monkeypatch.setattr(connections, "NUM_EXTRA", 2)

    def test_idle_connections_give_their_places_up(self, connect):
        """The oldest of the address that has too many, and of the address with the most where there are too many."""
        with running() as (port, _, _):
            idle = [connect(port) for _ in range(20)]
            assert ask(port, "/health") == ask(port) == (200, b"fine")
            assert is_ended(idle[0]) and is_ended(idle[10])

    def test_connections_with_requests_keep_theirs(self, connect):
        with running() as (port, live, application):
            busy = [connect(port, head(b"wait")) for _ in range(4)]
            wait_for(lambda: application.num_waiting == 4)
            status, content = ask(port)
            assert (status, json.loads(content)["error"]["code"]) == (503, "too_many_connections")
            assert ask(port, "/health") == (200, b"fine")
            wait_for(lambda: len(live) == 4)
            extra = [connect(port) for _ in range(2)]
            wait_for(lambda: len(live) == 6)
            assert ask(port, "/health") == (200, b"fine")
            assert is_ended(extra[0])
            application.go_on.set()
            assert all(map(is_answered, busy))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("a socket", "a socket"),
    ],
)
def test_addresses(host, address):
    assert address_of((host, 80)) == address


def test_no_address():
    assert address_of(None) == ""
