"""Slots whose calls the other processes that share the model repeat."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from specjax import proposers, scorers, verifiers
from specjax.engine.slots import Slots
from specjax.parallel import OnMesh
from specjax.processes.group import joined
from specjax.processes.leader import Calls, Leader
from specjax.types import Model, Proposer, Scorer, Verifier

# The methods that change the state, or whose results are arguments of these.
REPEATED = ("insert", "evict", "kept", "put_back", "set_pages", "set_grammars", "prefill", "feed", "step", "mixed_step")


Method = TypeVar("Method", bound=Callable[..., Any])


def leads(model: Model) -> bool:
    """Return whether other processes share a model and repeat the calls that this process makes.

    Raises:
        RuntimeError: this process is one of those that follow.
    """
    group, apply = joined(), model.apply
    if group is None or not isinstance(apply, OnMesh) or apply.whole.is_fully_addressable:
        return False
    if not isinstance(group, Leader):
        raise RuntimeError(f"process {group.process_id} follows process 0: it must call `follow` and nothing else")
    return True


def sent(method: Method) -> Method:
    """Return a method that sends its name and its arguments to the other processes before it is called."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.calls.lock:
            self.calls.send(method.__name__, args, options)
            result = method(self, *args, **options)
            self.calls.keep(result)
        return result

    repeated: Any = call
    return repeated


class Repeated(Slots):
    """Slots of the process that leads: the others make the same slots, and repeat each call that changes the state.

    It takes the arguments of `Slots`.

    Attributes:
        calls: how the calls reach the other processes.

    Raises:
        ValueError: as `Leader.start`.
    """

    calls: Calls

    def __init__(
        self,
        model: Model,
        proposer: Proposer | None = None,
        *,
        verifier: Verifier = verifiers.rejection,
        scorer: Scorer = scorers.mqa,
        **sizes: Any,
    ):
        self._loaded, self._options = (proposer or proposers.none(), verifier, scorer), sizes
        super().__init__(model, proposer, verifier=verifier, scorer=scorer, **sizes)

    def _make_state(self, pool: tuple[int, int] | None, chunk_size: int) -> None:
        """Make the state after the others have been told to: they compile the same programs at the same time."""
        group = joined()
        assert isinstance(group, Leader), "`leads` was asked"
        with group.lock:
            self.calls = group.start(self, *self._loaded, self._options)
            super()._make_state(pool, chunk_size)
            self.calls.keep(self.no_features)

    insert = sent(Slots.insert)
    evict = sent(Slots.evict)
    kept = sent(Slots.kept)
    put_back = sent(Slots.put_back)
    set_pages = sent(Slots.set_pages)
    set_grammars = sent(Slots.set_grammars)
    prefill = sent(Slots.prefill)
    feed = sent(Slots.feed)
    step = sent(Slots.step)
    mixed_step = sent(Slots.mixed_step)
