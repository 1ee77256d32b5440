"""Connections between processes: frames of bytes, and signs of life, so that a process that is lost is noticed.

A frame is one byte that says its kind, the length of its content in eight bytes, and the content.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

HEARTBEAT = 5.0  # seconds between signs of life
LOST_AFTER = 30.0  # seconds without a sign after which a process is lost
CALL, READY, FAILED, END, ALIVE, HELLO = b"C", b"R", b"F", b"E", b"A", b"H"
MAX_HELLO = 2**20  # bytes of a frame from somebody who is not known yet
_HEAD = struct.Struct("!cQ")
_RETRY = 0.2  # seconds between two attempts to connect


class Lost(ConnectionError):
    """The process at the other end has gone, or gives no sign of life."""


class Connection:
    """A connection to another process.

    Args:
        link: a connected socket.
        name: name of the other process in errors.
    """

    def __init__(self, link: socket.socket, name: str):
        self.name, self._link, self._lock = name, link, threading.Lock()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(LOST_AFTER)

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a frame; threads may send at the same time.

        Raises:
            Lost: the other process does not take it.
        """
        with self._lock, self._losses():
            self._link.sendall(_HEAD.pack(kind, len(content)) + content)

    def receive(self, most: float = float("inf"), within: float | None = None) -> tuple[bytes, bytes]:
        """Return the kind and the content of the next frame that is no mere sign of life.

        Args:
            most: the most bytes that its content may have.
            within: seconds in which all of it must come, whatever else does; None is any.

        Raises:
            Lost: the other process has gone, or is silent for `LOST_AFTER` seconds, or the frame is too long or late.
        """
        deadline = None if within is None else time.monotonic() + within
        with self._losses():
            while True:
                kind, length = _HEAD.unpack(self._read(_HEAD.size, deadline))
                if length > most:
                    raise Lost(f"{self.name} does not speak as a process of specjax does")
                content = self._read(length, deadline)
                if kind != ALIVE:
                    return kind, content

    def close(self) -> None:
        """Close the connection, which the other process notices."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def limit(self, seconds: float) -> None:
        """Set the seconds of silence after which the other process is lost."""
        self._link.settimeout(seconds)

    def _read(self, length: int, deadline: float | None) -> bytes:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._link.settimeout(left)
            count = self._link.recv_into(view)
            if not count:
                raise Lost(f"{self.name} has gone")
            view = view[count:]
        return bytes(content)

    @contextlib.contextmanager
    def _losses(self):
        try:
            yield
        except TimeoutError:
            raise Lost(f"{self.name} has given no sign of life for {self._link.gettimeout():.0f} seconds") from None
        except Lost:
            raise
        except OSError as error:
            raise Lost(f"{self.name} has gone: {error.strerror or error}") from None


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port: of this machine alone where the host is, else of all its addresses.

    Raises:
        OSError: the port is in use.
    """
    try:
        if is_loopback(host):
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise OSError(f"cannot listen at port {port} of the coordinator: {error.strerror or error}") from error


def is_loopback(host: str) -> bool:
    """Return whether an address reaches this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def connect(host: str, port: int, hello: Any, timeout: float) -> tuple[Connection, Any]:
    """Connect to process 0, send it a value of JSON, and return the connection and its answer.

    It waits for a process 0 that has not started, and for the others that process 0 waits for.

    Raises:
        ValueError: process 0 refuses, and says why.
        Lost: process 0 cannot be reached within `timeout` seconds, or goes.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            link = socket.create_connection((host, port), timeout=max(_RETRY, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() + _RETRY >= deadline:
                reason = f"cannot be reached at {host}:{port} within {timeout:g} seconds"
                raise Lost(f"process 0 {reason}: {error.strerror or error}") from None
            time.sleep(_RETRY)
    connection = Connection(link, "process 0")
    try:
        connection.limit(max(_RETRY, deadline - time.monotonic()) + LOST_AFTER)
        connection.send(HELLO, json.dumps(hello).encode())
        kind, content = connection.receive(MAX_HELLO)
        if kind != HELLO:
            raise ValueError(content.decode())
        connection.limit(LOST_AFTER)
        return connection, json.loads(content)
    except BaseException:
        connection.close()
        raise


def accept(
    listener: socket.socket, num_processes: int, check: Callable[[Any, int], None], timeout: float
) -> dict[int, Connection]:
    """Wait for all other processes, and return the connection to each by its number.

    Whoever is no process of specjax is turned away.

    Args:
        listener: result of `listen`.
        num_processes: the number of processes, with this one.
        check: a function of the hello of a process, and its number, that raises ValueError where it does not fit; the
            processes that have come are told.
        timeout: seconds in which all must come.

    Raises:
        ValueError: a process does not fit, or has the number of another.
        Lost: some do not come in time.
    """
    deadline, found, all_that_came = time.monotonic() + timeout, dict[int, Connection](), []
    try:
        while len(found) < num_processes - 1:
            number, connection, hello = _accept_one(listener, deadline, num_processes, timeout, found)
            all_that_came.append(connection)
            if number in found:
                raise ValueError(f"every process must have a number of its own, got two with process_id = {number}")
            found[number] = connection
            check(hello, number)
    except (ValueError, Lost) as error:
        for connection in all_that_came:
            with contextlib.suppress(Lost):
                connection.send(FAILED, str(error).encode())
            connection.close()
        raise
    return found


def _accept_one(
    listener: socket.socket, deadline: float, num_processes: int, timeout: float, found: dict[int, Connection]
) -> tuple[int, Connection, Any]:
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            link, address = listener.accept()
        except TimeoutError:
            missing = [str(i) for i in range(1, num_processes) if i not in found]
            text = f"process{'es' * (len(missing) > 1)} {', '.join(missing)} of {num_processes}"
            raise Lost(f"{text} did not come within {timeout:g} seconds") from None
        connection = Connection(link, f"{address[0]}:{address[1]}")
        try:
            _, content = connection.receive(MAX_HELLO, min(HEARTBEAT, max(0.01, deadline - time.monotonic())))
            hello = json.loads(content)
            number = hello["process_id"]
            is_known = type(number) is int and number > 0
        except (Lost, ValueError, TypeError, KeyError, RecursionError):
            is_known = False
        if is_known:
            connection.limit(LOST_AFTER)
            connection.name = f"process {number} ({address[0]})"
            return number, connection, hello
        connection.close()
