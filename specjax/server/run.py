"""Run the server of an LLM until a signal ends it."""

import logging
import math
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import uvicorn

from specjax.engine.engine import Engine
from specjax.engine.llm import LLM
from specjax.engine.sizes import default_sizes
from specjax.models import EMBEDDED
from specjax.sampling.capacities import Capacities
from specjax.server.app import About, App
from specjax.server.connections import HEADER_SECONDS, Connection, Places
from specjax.server.desk import Desk, http_process
from specjax.server.guard import MAX_HEADER_BYTES
from specjax.server.log import AccessLog, Write
from specjax.server.served import Served, served
from specjax.server.wire import write_served

SECONDS_TO_CLOSE = 5  # from the end of the last request, or of their time, to the end of the process
CAPACITIES = Capacities(grammars=16, grammar_states=16384)
GRAMMAR_SECONDS = 10.0  # that a grammar may take to compile
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d+)?")  # as browsers write it


def serve(
    llm: LLM,
    name: str,
    aliases: Sequence[str] = (),
    *,
    takes_any_name: bool = False,
    host: str,
    port: int,
    num_slots: int | None,
    step_sizes: Sequence[int] | None = None,
    max_waiting: int,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    request_timeout: float,
    shutdown_timeout: float,
    access_log: bool = True,
) -> int:
    """Serve an LLM until SIGINT or SIGTERM, and return the exit code: 0, or 1 where the engine failed.

    Args:
        llm: the models.
        name: name of the model for clients.
        aliases: further names that clients may use.
        takes_any_name: whether clients may use any other name, too.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
        num_slots: number of samples that run at a time; None is 16, and 8 on CPUs.
        step_sizes: as `Engine` takes them.
        max_waiting: the most requests that wait for a slot.
        api_keys: the keys that clients may use; without any, everybody may.
        allowed_origins: other sites whose pages may use the server in a browser, as SCHEME://HOST:PORT; "*" is all.
        request_timeout: seconds that a request may take.
        shutdown_timeout: seconds that requests may still take after the first signal; a second signal ends them.
        access_log: whether standard error gets a line for each request.

    Raises:
        ValueError: an argument is out of its range.
        OSError: the address is in use or not of this machine.
    """
    num_slots = default_sizes("server").slots if num_slots is None else num_slots
    least = {"num_slots": (num_slots, 1), "max_waiting": (max_waiting, 0), "shutdown_timeout": (shutdown_timeout, 0)}
    check(least, request_timeout, api_keys)
    for origin in allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(f"allowed_origin must be * or SCHEME://HOST[:PORT] without a path, got {origin!r}")
    is_local = host in LOOPBACK
    if not is_local and not api_keys:
        print(f"specjax: warning: whoever reaches {host} may use the server, as it has no keys", file=sys.stderr)
    with _listen(host, port) as listener:
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        options = {"api_keys": list(api_keys), "request_timeout": request_timeout, "is_local": is_local}
        options["allowed_origins"] = list(allowed_origins)
        known = served(llm, name, aliases, takes_any_name=takes_any_name)
        setup = {"served": write_served(known), "about": asdict(_about(llm)), "options": options}
        with http_process(listener) as (process, channel):
            desk = Desk(channel, setup | {"shutdown_timeout": shutdown_timeout, "access_log": access_log})
            with start_engine(llm, num_slots, max_waiting, step_sizes) as engine:
                listener.close()  # it is the other process's now
                with _signals(desk.end):
                    desk.serve(engine, lambda: print(f"specjax: {name} is ready at {address}", flush=True))
                has_failed = not engine.is_running
    if process.returncode:
        print(f"specjax: error: the process that speaks HTTP has ended with code {process.returncode}", file=sys.stderr)
    return 1 if has_failed or process.returncode else 0


@contextmanager
def _signals(end: Callable[[], object]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call a function."""
    before = {number: signal.signal(number, lambda *_: end()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_engine(llm: LLM, num_slots: int, max_waiting: int | None, step_sizes: Sequence[int] | None = None) -> Engine:
    """Start an engine for the requests of clients, with the arguments of `Engine`."""
    return Engine.of(
        llm,
        num_slots=num_slots,
        capacities=CAPACITIES,
        grammar_seconds=GRAMMAR_SECONDS,
        max_waiting=max_waiting,
        step_sizes=step_sizes,
    )


def make_app(engine: Engine, llm: LLM, known: Served, **options: Any) -> App:
    """Return the application of an engine that `start_engine` has started, with the options of `App`."""
    return App(engine, known, _about(llm), **options)


def _about(llm: LLM) -> About:
    # The embedded family has a template, so that clients may send it messages, but goes on with source code alone.
    checkpoint = llm.checkpoint
    chats = checkpoint is not None and checkpoint.has_chat_template and EMBEDDED not in checkpoint.directory.parents
    return About(llm.proposer.num_draft_tokens, getattr(llm.verifier, "__name__", "unknown"), chats)


def check(least: Mapping[str, tuple[float, float]], request_timeout: float, api_keys: Sequence[str]) -> None:
    """Raise ValueError for an argument out of its range; `least` has numbers and the least that they may be."""
    for name, (number, smallest) in least.items():
        if not smallest <= number < math.inf:
            raise ValueError(f"{name} must be at least {smallest}, got {number}")
    if not 0 < request_timeout < math.inf:
        raise ValueError(f"request_timeout must be positive, got {request_timeout}")
    if not all(re.fullmatch("[!-~]+", key) for key in api_keys):
        raise ValueError("api_key must be one or more printable characters of ASCII, without spaces")


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; a port in use is found before models are compiled."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OverflowError as error:
        listener.close()
        raise ValueError(f"port must be in [0, 65535], got {port}") from error
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return listener


class Server(uvicorn.Server):
    """Run an application; after a signal its requests may finish while new ones are turned away.

    Args:
        app: the application.
        shutdown_timeout: seconds that requests may still take after a signal.
        greet: is called when it listens.
        write: writes a line for each request; None is no log.

    Attributes:
        has_failed: whether it ended because the engine failed.
    """

    def __init__(self, app: App, shutdown_timeout: float, greet: Callable[[], object], write: Write | None = None):
        config = uvicorn.Config(
            app.outermost if write is None else AccessLog(app.outermost, write),
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_level=logging.ERROR,  # a warning for every request that is no HTTP would be too many
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(HEADER_SECONDS),
            timeout_graceful_shutdown=SECONDS_TO_CLOSE,
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self.server_state = Places()
        self._app, self._timeout, self._deadline = app, shutdown_timeout, math.inf
        self._greet, self.has_failed = greet, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._greet()

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()  # they are `serve`'s

    def end(self) -> None:
        """Turn new requests away, and end when those that run have finished; the second time, end at once."""
        if self._app.guard.is_ending:
            self.should_exit = True
        self._deadline = min(self._deadline, time.monotonic() + self._timeout)
        self._app.guard.is_ending = True

    async def on_tick(self, counter: int) -> bool:
        guard = self._app.guard
        should_exit = await super().on_tick(counter)
        if not guard.is_ending and not self._app.engine.is_running:
            self.has_failed = True
            self.end()
        if guard.is_ending and (not guard.tasks or time.monotonic() >= self._deadline):
            should_exit = True
        if should_exit:
            guard.is_ending = True
            for task in tuple(guard.tasks):
                task.cancel()
        return should_exit
