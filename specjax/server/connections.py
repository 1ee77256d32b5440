"""Connections that nobody can hold for nothing: the places that they take, and the time that their clients have."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from specjax.server.guard import address_of

MAX_CONNECTIONS = 4096
MAX_CONNECTIONS_OF_ADDRESS = 2048
NUM_EXTRA = 64  # connections beyond these numbers, which are told so, and about the health of the server
HEADER_SECONDS = 10.0  # from the beginning of a connection, or the end of an answer, to the end of the next header
READER_SECONDS, READER_BYTES = 30.0, 2**16  # in which a client that is behind must take so much of its answer
MAX_AHEAD = 2**20  # bytes that a client may send before the answer that it waits for


class Places(ServerState):
    """Give places to connections. Where none is left, the connection that has been idle for longest loses its place."""

    def __init__(self):
        super().__init__()
        self._of_address: dict[str, dict[Connection, None]] = {}  # connections; idle ones in the order of their time
        self._count = 0

    def take(self, connection: "Connection") -> bool:
        """Give a place to a new connection. Return False, where there is none: the connection must end."""
        own = self._of_address.get(connection.address, {})
        over = max(len(own) - MAX_CONNECTIONS_OF_ADDRESS, self._count - MAX_CONNECTIONS)
        if over >= 0:
            is_alone = len(own) >= MAX_CONNECTIONS_OF_ADDRESS
            crowds = [own] if is_alone else sorted(self._of_address.values(), key=len, reverse=True)
            idle = [each for crowd in crowds for each in crowd if each.is_idle]
            oldest = next((each for each in idle if not each.is_extra), None)
            connection.is_extra = oldest is None
            if oldest is None and over >= NUM_EXTRA:
                if not idle:
                    return False
                oldest = idle[0]
            if oldest is not None:
                self.leave(oldest)
                oldest.transport.abort()
        self._of_address.setdefault(connection.address, {})[connection] = None
        self._count += 1
        return True

    def leave(self, connection: "Connection") -> None:
        """Take the place back, where the connection still has it."""
        own = self._of_address.get(connection.address, {})
        if connection in own:
            del own[connection]
            self._count -= 1
        if not own:
            self._of_address.pop(connection.address, None)

    def note_idle(self, connection: "Connection") -> None:
        """Note that a connection is idle from now on."""
        own = self._of_address.get(connection.address, {})
        if connection in own:
            own[connection] = own.pop(connection)


class Connection(H11Protocol):
    """A connection whose client must send headers, and read answers, in time.

    Attributes:
        address: address of its client, as `guard.address_of` returns it.
        is_extra: whether it holds none of the places, so that only questions about the health are answered.
    """

    server_state: Places
    address = ""
    is_extra = False
    _header_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self._header_timer is not None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that it tells whenever a client is behind
        self.address = address_of(self.client)
        if self.server_state.take(self):
            self.app_state = {**self.app_state, "is_extra": self.is_extra}
            self._expect_header()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_reader_timer()
        self.server_state.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        ahead, _ = self.conn.trailing_data
        if len(ahead) > MAX_AHEAD:
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()

    def on_response_complete(self) -> None:
        self._expect_header()
        self.server_state.note_idle(self)
        super().on_response_complete()  # which may have the next request already

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reader_timer()

    def _expect_header(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._end_without_header)

    def _end_without_header(self) -> None:
        if self.flow.write_paused:  # its client still reads the answer before
            self._expect_header()
        else:
            self.transport.abort()

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(READER_SECONDS, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < READER_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
