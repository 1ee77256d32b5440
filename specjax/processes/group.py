"""Processes that run one model together: process 0 leads, and the others repeat its calls to the devices.

Every process loads its part of the model. Process 0 alone has requests, text and the results. Before each call of
`Slots` it sends the name and the arguments to the others, so that all run the same programs in the same order. A
process that fails or is lost ends them all, because what it had of the model is missing.
"""

import atexit
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax

import specjax
from specjax.processes import connection as connections
from specjax.processes import fingerprint
from specjax.processes.connection import ALIVE, END, FAILED, HEARTBEAT, HELLO, Connection, Lost
from specjax.validation import is_integer

SECONDS_TO_JOIN = 300.0
SECONDS_TO_END = 30  # from the end of process 0 to that of the others
SECONDS_TO_BLAME = 2.0  # after a failure, in which it may turn out that another process was lost
VARIABLES = (  # of launchers: the number of processes and that of this one
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
)


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
        """Read what another process sends, until it ends."""
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


def join(
    coordinator: str,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    timeout: float = SECONDS_TO_JOIN,
) -> Group:
    """Meet the other processes of a job, and return their group. It comes before every other use of JAX.

    Args:
        coordinator: "host:port", the address of process 0, which listens there until all have come. Connections are
            neither encrypted nor authenticated: the network between the processes must be private.
        num_processes: the number of processes. None takes it from the variables of Slurm, Open MPI or LeaderWorkerSet.
        process_id: the number of this process, from 0. None takes it from these variables.
        arguments: values by their names that must be the same in all processes, to be compared by their `repr`.
        timeout: seconds in which all processes must come.

    Returns:
        A `Leader` in process 0, a `Follower` in the others. Use it in a `with` statement.

    Raises:
        ValueError: an argument is wrong, or something that must be the same in all processes is not.
        ConnectionError: a process did not come in time.
        OSError: the port of the coordinator is in use.
        RuntimeError: JAX has been used before, or the process has joined a group already.
    """
    from specjax.processes.follower import Follower
    from specjax.processes.leader import Leader

    global _joined
    if _joined is not None:
        raise RuntimeError("a process joins one group, and this one has joined one before")
    host, port = _address(coordinator)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be positive and finite, got {timeout}")
    num_processes, process_id = _numbers(num_processes, process_id)
    own = fingerprint.of_start(specjax.__version__, num_processes, arguments or {})
    meet: Callable = _lead if process_id == 0 else _follow
    others, jax_address = meet(host, port, num_processes, process_id, own, timeout)
    group = _joined = (Leader if process_id == 0 else Follower)(process_id, num_processes, others)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the command
    try:
        jax.distributed.initialize(
            jax_address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate",  # which would take devices away from a process of Slurm
            initialization_timeout=int(timeout) + 1,
            shutdown_timeout_seconds=SECONDS_TO_END,
            coordinator_bind_address=jax_address if connections.is_loopback(host) else None,
        )
    except Exception as error:
        group.fail(str(error))
        raise
    return group


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator must be host:port, got {coordinator!r}")
    return host.strip("[]"), int(port)


def _numbers(num_processes: int | None, process_id: int | None) -> tuple[int, int]:
    """Return the two numbers, which launchers keep in variables."""
    if num_processes is None and process_id is None:
        for names in VARIABLES:
            texts = [os.environ.get(name, "") for name in names]
            if all(text.isdecimal() for text in texts):
                num_processes, process_id = map(int, texts)
                break
    if num_processes is None or not (is_integer(num_processes) and num_processes >= 2):
        raise ValueError(f"num_processes must be an integer >= 2, got {num_processes!r}")
    if process_id is None or not (is_integer(process_id) and 0 <= process_id < num_processes):
        raise ValueError(f"process_id must be in [0, num_processes = {num_processes}), got {process_id!r}")
    return num_processes, process_id


def _lead(
    host: str, port: int, num_processes: int, _: int, own: Mapping[str, str], timeout: float
) -> tuple[dict[int, Connection], str]:
    """Meet the other processes as process 0, and tell them where JAX's own service will listen."""

    def check(hello: Any, number: int) -> None:
        theirs = hello.get("fingerprint")
        fingerprint.check_same(own, theirs if isinstance(theirs, dict) else {}, number)

    with connections.listen(host, port) as listener:
        others = connections.accept(listener, num_processes, check, timeout)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    for other in others.values():
        other.send(HELLO, str(port).encode())
    return others, _join_address(host, port)


def _follow(
    host: str, port: int, _: int, process_id: int, own: Mapping[str, str], timeout: float
) -> tuple[dict[int, Connection], str]:
    """Meet process 0."""
    hello = {"process_id": process_id, "fingerprint": own}
    leader, port = connections.connect(host, port, hello, timeout)
    return {0: leader}, _join_address(host, port)


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
