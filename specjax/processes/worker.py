"""A process that answers one question at a time, and is ended where it takes too long."""

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from specjax.processes.child import read_frame, write_frame


class NoAnswer(Exception):
    """The process has ended, or was ended, before it answered; the message says which."""


class Worker:
    """A process that answers each frame that it reads by one that it writes.

    Args:
        start: a function that starts it, with these options of `subprocess.Popen`.
    """

    def __init__(self, start: Callable[..., subprocess.Popen]):
        self._process = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def is_alive(self) -> bool:
        """Whether it may be asked."""
        return self._process.poll() is None

    def close(self) -> int:
        """End it and return its code; who waits for an answer gets an error."""
        self._process.kill()
        code = self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of bytes that it has not read
                assert file is not None
                file.close()
        return code

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Return the answer to a question.

        Raises:
            NoAnswer: there is none within these seconds, or the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            write_frame(self._process.stdin, question)
            return read_frame(self._process.stdout)
        except BaseException as error:  # else a later question would get this answer after an interruption
            code = self.close()
            if not isinstance(error, EOFError | OSError | ValueError):  # the last of a file that `close` has closed
                raise
            reason = "no answer in time" if is_late.is_set() else f"the end of its process with code {code}"
            raise NoAnswer(reason) from error
        finally:
            timer.cancel()
