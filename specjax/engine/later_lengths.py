"""The numbers of draft tokens K that steps may have from some time on, while an engine serves with others."""

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax

from specjax.engine.draft_length import ByStepTimes
from specjax.engine.later_steps import LaterSteps
from specjax.engine.scheduler import Scheduler
from specjax.engine.slots import Slots
from specjax.engine.step_times import Measurement, interpolated, keep_step_times, known_step_times, step_times_of
from specjax.types import Proposer

logger = logging.getLogger(__name__)


def first_lengths(draft_lengths: Sequence[int], *, is_by_times: bool, longest: int | None = None) -> tuple[int, ...]:
    """Return the K whose steps are compiled before an engine serves: the smallest and the largest, or all.

    These are all where a function of the caller may take any, and where several processes must compile in one order.

    Args:
        draft_lengths: the K that steps may have in the end.
        is_by_times: whether K is chosen by the seconds of steps.
        longest: the largest of them that may be first, where larger ones stand for less work; None is any.
    """
    if not is_by_times or jax.process_count() > 1:
        return tuple(draft_lengths)
    largest = max((k for k in draft_lengths if longest is None or k <= longest), default=max(draft_lengths))
    return tuple(sorted({min(draft_lengths), largest}))


def measured_choice(
    device: Slots, proposer: Proposer, first: Collection[int], use: int
) -> tuple[ByStepTimes, Measurement | None]:
    """Return a choice among the K of a device by the seconds of its steps, and a measurement that has to wait, if any.

    Where the seconds are not known, they are measured, but of the first K alone where there are others. The seconds of
    the others are assumed to lie on lines between them.

    Args:
        device: the device, whose slots are all vacant.
        proposer: as `ByStepTimes` takes it.
        first: the K whose steps are compiled.
        use: as `step_times_of` takes it.
    """
    lengths, later = device.draft_lengths, None
    times = known_step_times(device, device.step_sizes, use)
    if times is None and set(first) == set(lengths):
        times = step_times_of(device, device.step_sizes, use)
    elif times is None:
        now, later = (Measurement(device, device.step_sizes, use, each) for each in (first, lengths))
        times = interpolated(now.complete(), lengths)
    return ByStepTimes(times, lengths, proposer), later


class LaterLengths:
    """The K of a device whose steps are compiled later; `LaterSteps` compiles them in threads.

    The methods are called by the thread of the engine, except `join`.

    Args:
        device: the device.
        choice: chooses among the K that are allowed, at first those whose steps are compiled.
        uses: as `Slots.compile` takes them.
        first: the K whose steps are compiled.
        measurement: of the steps of all K, which waits until these are compiled and no request is there.
        send: has the thread of the engine call a function with arguments.
        settings: as `LaterSteps` takes it.

    Attributes:
        settled: has a result when the choice has all K and their seconds, or the error for which it never will.
    """

    def __init__(
        self,
        device: Slots,
        choice: Any,
        uses: Collection[tuple[int, bool]] | None,
        *,
        first: Collection[int],
        measurement: Measurement | None,
        send: Callable[..., None],
        settings: Callable[[], AbstractContextManager],
    ):
        self._device, self._choice, self._measurement = device, choice, measurement
        self._allowed = list(first)
        self.settled: Future[None] = Future()
        later = sorted(set(device.draft_lengths) - set(first))
        if later:
            logger.info("the steps of %s draft tokens are compiled beside the first requests", _listed(later))
            choice.allow(first)
        else:
            self.settled.set_result(None)
        self._steps = LaterSteps(
            device,
            {k: device.steps(uses, [k]) for k in later},
            admit=partial(send, self._admit),
            fail=partial(send, self._fail),
            settings=settings,
        )

    @property
    def can_measure(self) -> bool:
        """Whether the next part of the measurement waits for a time without requests alone."""
        return self._measurement is not None and set(self._allowed) == set(self._device.draft_lengths)

    def measure(self, scheduler: Scheduler, goes_on: Callable[[], bool]) -> None:
        """Measure a part, while there are no requests, as long as `goes_on` returns True."""
        measurement = self._measurement
        assert measurement is not None, "`can_measure` was asked"
        pages = scheduler.lend_device()
        if pages is not None and not pages:
            logger.info("the seconds of steps are not measured, as prompts have all pages of the cache")
            self._settle()
            return
        measurement.advance(pages, goes_on)
        if measurement.times is not None:
            device, use = self._device, measurement.use
            keep_step_times(device, device.step_sizes, use, measurement.times, measurement.seconds)
            self._choice.times = measurement.times
            self._settle()

    def end(self, error: BaseException) -> None:
        """Begin with no further program; `settled` gets an error, unless it has a result."""
        self._steps.stop()
        if not self.settled.done():
            self.settled.set_exception(error)

    def join(self) -> None:
        """Wait for the programs that are being compiled."""
        self._steps.join()

    def _settle(self) -> None:
        self._measurement = None
        self.settled.set_result(None)

    def _admit(self, k: int) -> None:
        """Let steps have K draft tokens, whose programs are ready."""
        self._allowed.append(k)
        self._choice.allow(self._allowed)
        logger.debug("the steps of %d draft tokens are ready", k)  # some commands write text meanwhile
        if set(self._allowed) == set(self._device.draft_lengths) and self._measurement is None:
            self._settle()

    def _fail(self, k: int, error: Exception) -> None:
        """Go on with the K that are ready."""
        text = f"the steps of {k} draft tokens do not compile, and those of {_listed(self._allowed)} go on: {error}"
        logger.error(text)
        failure = RuntimeError(text)
        failure.__cause__ = error
        self.end(failure)


def _listed(numbers: Collection[int]) -> str:
    """Return numbers as a text, the smallest first."""
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} and {last}" if others else last
