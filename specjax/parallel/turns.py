"""Turns of threads that call programs on the same devices.

The devices of a program wait for each other in its sums. Where two threads call programs at the same time, one device
could begin with the program of the first thread and another device with the program of the second. Both would wait for
ever.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

_locks: dict[Any, threading.RLock] = {}  # by device


@contextmanager
def turn_on(devices: Iterable[Any]) -> Iterator[None]:
    """Let this thread alone call programs on these devices meanwhile, so that all get them in one order.

    A single device waits for no other, and its threads need no turns. Turns of other threads on other devices go on.
    """
    in_order = sorted(devices, key=lambda device: (device.platform, device.id))  # in one order, so that no turn blocks
    with ExitStack() as turns:
        for device in in_order if len(in_order) > 1 else ():
            turns.enter_context(_locks.setdefault(device, threading.RLock()))
        yield


def in_turn(method: Method) -> Method:
    """Return a method that takes its turn on the devices in the attribute `devices` of its object."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if len(self.devices) == 1:
            return method(self, *args, **options)
        with turn_on(self.devices):
            return method(self, *args, **options)

    with_turn: Any = call
    return with_turn
