"""Python's search for garbage, beside engines.

Tracing leaves about a million objects that stay. Python looks through all of them now and then, as long as a quarter of
a second, in which no stream gets a token. So what exists when an engine is ready is left out of the search until no
engine is open.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_open = 0  # engines


@contextmanager
def paused() -> Iterator[None]:
    """Search for no garbage while an engine starts, as nearly all that it makes stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_out() -> None:
    """Collect the garbage once, and leave all objects that exist by now out of later searches."""
    global _num_open
    with _lock:
        gc.collect()
        _num_open += 1
    leave_out_more()


def leave_out_more() -> None:
    """Leave all objects that exist by now out, too, while an engine is open; their garbage stays until none is."""
    with _lock:
        if _num_open:
            gc.freeze()


def take_back() -> None:
    """Undo `leave_out` of one engine: after the last one, searches are of all objects again."""
    global _num_open
    with _lock:
        _num_open -= 1
        if not _num_open:
            gc.unfreeze()
