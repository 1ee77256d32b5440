"""The process that speaks HTTP: the application, behind a socket, of an engine that another process has.

It uses no devices. Signals are the other process's to take: this one ends when it is told so, or when the other ends.
"""

import asyncio
import gc
import json
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from specjax.processes.child import LENGTH
from specjax.server import wire
from specjax.server.app import About, App
from specjax.server.connections import MAX_CONNECTIONS, NUM_EXTRA
from specjax.server.log import Lines, watch_load
from specjax.server.remote import RemoteEngine
from specjax.server.run import Server

OTHER_FILES = 256  # open files beside connections
BUFFER = 2**20  # bytes of frames that wait to be read here; those after them wait at the engine


def main() -> None:
    """Serve until the other process says that it is enough, or ends."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which may be sent to all processes of a service at once
        signal.signal(each, signal.SIG_IGN)
    channel, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    gc.freeze()  # loaded modules stay
    _allow_files(MAX_CONNECTIONS + NUM_EXTRA + OTHER_FILES)
    with suppress(asyncio.IncompleteReadError, ConnectionError):  # the other process has ended before it was ready
        asyncio.run(serve(channel, listener))


def _allow_files(number: int) -> None:
    """Let the process open so many files, as far as the system allows."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


async def serve(channel: socket.socket, listener: socket.socket) -> None:
    """Serve at a socket, as the `Desk` at the other end of a channel says."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(sock=channel, limit=BUFFER)
    setup = json.loads(await _read_frame(reader))
    engine = RemoteEngine(lambda data: loop.call_soon_threadsafe(writer.write, data))
    app = App(engine, wire.read_served(setup["served"]), About(**setup["about"]), **setup["options"])
    listening = wire.write_question("listening", 0)
    lines = Lines(sys.stderr)
    write = lines.write if setup["access_log"] else None
    server = Server(app, setup["shutdown_timeout"], lambda: writer.write(listening), write)
    started = asyncio.Event()
    watching = asyncio.create_task(_watch(started, engine, lines))
    receiving = asyncio.create_task(_receive(reader, engine, {"start": started.set, "end": server.end}))
    try:
        await started.wait()
        if engine.is_running:
            await server.serve(sockets=[listener])
    finally:
        receiving.cancel()
        watching.cancel()
        engine.lose()  # threads may wait for it
        writer.close()
        lines.close()


async def _watch(started: asyncio.Event, engine: RemoteEngine, lines: Lines) -> None:
    await started.wait()
    await watch_load(engine, lines.write)


async def _receive(
    reader: asyncio.StreamReader, engine: RemoteEngine, commands: Mapping[str, Callable[[], object]]
) -> None:
    """Take the frames of the engine, until its process ends."""
    try:
        while True:
            for word in engine.receive(await _read_frame(reader)):
                commands[word]()
    except (asyncio.IncompleteReadError, ConnectionError):
        engine.lose()
        commands["start"]()  # of nothing, where that did not come


async def _read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)
