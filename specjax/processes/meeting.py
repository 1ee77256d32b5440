"""How the processes of a job meet, before any of them uses JAX."""

import math
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax

from specjax.processes import connection as connections
from specjax.processes import fingerprint
from specjax.processes.connection import HELLO, Connection
from specjax.processes.follower import Follower
from specjax.processes.group import SECONDS_TO_END, Group, enter, joined
from specjax.processes.leader import Leader
from specjax.validation import is_integer
from specjax.version import __version__

SECONDS_TO_JOIN = 300.0
VARIABLES = (  # of launchers: the number of processes and the index of this one
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
)


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
    if joined() is not None:
        raise RuntimeError("a process joins one group, and this one has joined one before")
    host, port = _address(coordinator)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be positive and finite, got {timeout}")
    num_processes, process_id = _numbers(num_processes, process_id)
    own = fingerprint.of_start(__version__, num_processes, arguments or {})
    meet: Callable = _lead if process_id == 0 else _follow
    others, jax_address = meet(host, port, num_processes, process_id, own, timeout)
    group = (Leader if process_id == 0 else Follower)(process_id, num_processes, others)
    enter(group)
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
