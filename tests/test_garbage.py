"""Python's search for garbage beside engines."""

import gc
import threading

import pytest
from test_engine import engine_of
from test_slots import make

from specjax.engine import garbage

# As they are before the tests' engines lose them.
from specjax.engine.garbage import leave_out, leave_out_more, paused, take_back


def is_searched(thing) -> bool:
    return any(each is thing for each in gc.get_objects())


def test_what_exists_is_left_out_until_no_engine_is_open():
    before = [[]]
    leave_out()
    try:
        after = [[]]
        assert (is_searched(before), is_searched(after)) == (False, True)
        leave_out_more()
        assert not is_searched(after)
        leave_out()
        assert not is_searched(after)
        take_back()
        assert not is_searched(before)
    finally:
        take_back()
    assert is_searched(before) and is_searched(after)
    leave_out_more()
    assert is_searched(before)


def test_garbage_goes_before_the_rest_is_left_out():
    class Node:
        pass

    ends = threading.Event()
    node = Node()
    node.itself, node.at_end = node, Finalized(ends)
    del node
    with paused():
        leave_out()
    take_back()
    assert ends.is_set()


class Finalized:
    def __init__(self, ends: threading.Event):
        self.ends = ends

    def __del__(self):
        self.ends.set()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_start_leaves_the_search_as_it_was(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), paused():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_an_engine_leaves_out_what_it_made_and_takes_it_back_once(monkeypatch):
    calls = []
    monkeypatch.setattr(garbage, "leave_out", lambda: calls.append("leave_out"))
    monkeypatch.setattr(garbage, "take_back", lambda: calls.append("take_back"))
    with engine_of(make(0), None) as engine:
        assert calls == ["leave_out"] and gc.isenabled()
    engine.close()
    assert calls == ["leave_out", "take_back"]
