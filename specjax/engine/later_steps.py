"""Compile the steps of further numbers of draft tokens in threads, while an engine serves with those that it has.

XLA compiles without the lock of Python, but JAX traces in Python, and a thread that waits for the lock gets it after
5 ms. A round of a scheduler waits for it several times, so the threads here leave it to others after `TURN`.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from specjax.engine import garbage
from specjax.engine.slots import COMPILED_AT_A_TIME, Slots, StepProgram

TURN = 0.0005  # seconds that a thread keeps the lock of Python while others wait
CORES = 4  # of the host for each program that is compiled at a time; the others are left to those who serve

_lock = threading.Lock()
_num_short, _usual = 0, 0.0  # blocks of `short_turns`, and the seconds of a turn outside them


class LaterSteps:
    """Programs of steps that threads compile.

    A thread ends after an error.

    Args:
        device: the slots, which others may call meanwhile.
        programs: the programs of each number of draft tokens, the first to be compiled first.
        admit: is called in a thread with each number of draft tokens whose programs are ready.
        fail: is called in a thread with the number whose programs will not be ready, and the error.
        settings: returns a context with the settings of JAX under which the device is called.
    """

    def __init__(
        self,
        device: Slots,
        programs: Mapping[int, Sequence[StepProgram]],
        *,
        admit: Callable[[int], None],
        fail: Callable[[int, Exception], None],
        settings: Callable[[], AbstractContextManager],
    ):
        self._device, self._admit, self._fail, self._settings = device, admit, fail, settings
        self._waiting = deque((k, program) for k, of_k in programs.items() for program in of_k)
        self._num_left = {k: len(of_k) for k, of_k in programs.items()}
        self._changing, self._tracing = threading.Lock(), threading.Lock()
        for k, number in self._num_left.items():
            if not number:
                admit(k)
        number = min(len(self._waiting), COMPILED_AT_A_TIME, max((os.cpu_count() or 1) // CORES, 1))
        # As daemons, so that `stop` can be called when the interpreter ends: otherwise it would wait for all programs.
        self._threads = [
            threading.Thread(target=self._run, name="specjax compiler", daemon=True) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin with no further program."""
        with self._changing:
            self._waiting.clear()

    def join(self) -> None:
        """Wait until the programs that are being compiled are ready or, without `stop`, until all are."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with self._settings(), short_turns():
            while True:
                with self._changing:
                    if not self._waiting:
                        return
                    k, program = self._waiting.popleft()
                try:
                    self._compile(program)
                except Exception as error:
                    self._fail(k, error)
                    return
                with self._changing:
                    self._num_left[k] -= 1
                    is_ready = not self._num_left[k]
                if is_ready:
                    self._admit(k)

    def _compile(self, program: StepProgram) -> None:
        with self._tracing, garbage.paused():
            lowered = self._device.lowered(program)
        garbage.leave_out_more()
        lowered.compile()


@contextmanager
def short_turns() -> Iterator[None]:
    """Let Python's threads take turns of `TURN` in a block."""
    global _num_short, _usual
    with _lock:
        if not _num_short:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN, _usual))
        _num_short += 1
    try:
        yield
    finally:
        with _lock:
            _num_short -= 1
            if not _num_short:
                sys.setswitchinterval(_usual)
