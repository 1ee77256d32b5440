"""Processes that run one model together: process 0 leads, and the others repeat its calls to the devices.

Every process loads its part of the model. Process 0 alone has requests, text and the results. Before each call of
`Slots` it sends the name and the arguments to the others, so that all run the same programs in the same order. A
process that fails or is lost ends them all, because its part of the model is missing.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from specjax.processes.connection import ALIVE, END, FAILED, HEARTBEAT, Connection, Lost

SECONDS_TO_END = 30  # from the end of process 0 to the end of the others
SECONDS_TO_BLAME = 2.0  # after a failure, in which it may turn out that another process was lost


class Group:
    """The processes of a job, as one of them sees the others. As a context manager it ends with its block.

    Where the block of a process fails, the others are told why, and end.

    Attributes:
        process_id: the number of this process.
        num_processes: the number of all.
        is_leader: whether it is process 0.
    """

    def __init__(self, process_id: int, num_processes: int, others: Mapping[int, Connection]):
        self.process_id, self.num_processes = process_id, num_processes
        self.is_leader = process_id == 0
        self._others = others
        self._is_ending = self._has_failed = False
        self._dying = threading.Lock()
        self._readers = [threading.Thread(target=self._read, args=(other,), daemon=True) for other in others.values()]
        for thread in (*self._readers, threading.Thread(target=self._show_life, daemon=True)):
            thread.start()
        atexit.register(self._leave)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._has_failed:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.end()
        else:
            self.fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, error)

    def end(self) -> None:
        """End the job, after which the processes take leave of each other."""
        raise NotImplementedError

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Tell the other processes that this one has failed, so that they end, too."""
        if isinstance(error, RuntimeError):
            time.sleep(SECONDS_TO_BLAME)
        self._is_ending = self._has_failed = True
        self._tell(f"process {self.process_id} failed: {reason}")

    def _received(self, other: Connection, kind: bytes, content: bytes) -> None:
        """Take a frame that is no failure; called by the thread that reads from `other`."""
        raise NotImplementedError

    def _read(self, other: Connection) -> None:
        """Read the messages of another process, until it ends."""
        kind = b""
        try:
            while kind != END:
                kind, content = other.receive()
                if kind == FAILED:
                    self._die(content.decode())
                self._received(other, kind, content)
        except Lost as error:
            if not self._is_ending:
                self._die(str(error))
        except Exception as error:  # else nobody would notice when the other process is lost
            self._die(f"what {other.name} sends cannot be read: {type(error).__name__}: {error}")

    def _show_life(self) -> None:
        while not self._is_ending:
            for other in self._others.values():
                with suppress(Lost):  # the thread that reads from it notices, too
                    other.send(ALIVE)
            time.sleep(HEARTBEAT)

    def _tell(self, reason: str) -> None:
        for other in self._others.values():
            with suppress(Lost):
                other.send(FAILED, reason.encode())

    def _die(self, reason: str) -> None:
        """End this process at once: the main thread may wait for a device that waits for a process that is lost."""
        self._dying.acquire()  # for good: the first reason counts
        if self.is_leader:
            self._tell(reason)
        print(f"specjax: error: {reason}; process {self.process_id} ends", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def _leave(self) -> None:
        """Leave a job that has failed without the others, for which JAX waits at the end of a process."""
        if self._has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_joined: Group | None = None


def joined() -> Group | None:
    """Return the group that this process has joined; None if it has not."""
    return _joined


def enter(group: Group) -> None:
    """Note that this process has joined a group."""
    global _joined
    _joined = group
