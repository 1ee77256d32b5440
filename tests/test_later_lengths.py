"""Numbers of draft tokens whose steps are compiled while an engine serves."""

import gc
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from test_engine import FEW, Tokenizer
from test_slots import CHUNK, EOS, MAX_LENGTH, NUM_PAGES, PAGE_SIZE, make

from specjax import SamplingParams, proposers, testing, verifiers
from specjax.engine import garbage, later_lengths, step_times
from specjax.engine.draft_length import ByStepTimes
from specjax.engine.engine import Engine
from specjax.engine.later_lengths import LaterLengths, first_lengths
from specjax.engine.later_steps import TURN, LaterSteps, short_turns
from specjax.engine.slots import Slots
from specjax.engine.step_times import interpolated
from specjax.sampling.capacities import Needs
from specjax.theory import StepTimes

LENGTHS = (0, 1, 2)
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
ONE_IS_BEST = StepTimes({1: {0: 1.0, 1: 1.0, 2: 9.0}})


def bigram(seed=0):
    return testing.bigram_model(jnp.asarray(np.random.default_rng(seed).normal(size=(40, 40)), jnp.float32))


def engine_of(target=None, **options):
    """An engine of one slot that compiles the programs of one request."""
    given = {"num_slots": 1, "max_length": 64, "tokenizer": Tokenizer(), "capacities": FEW, "warm_up": [PARAMS]}
    given |= {"page_size": 8, "chunk_size": 8, "prompt_sizes": [8], "draft_lengths": LENGTHS}
    return Engine(target or bigram(), proposers.ngram(2), verifier=verifiers.match, **(given | options))


@pytest.fixture
def used(monkeypatch):
    """The K of the steps that are taken."""
    found, step = [], Slots.step

    def recorded(self, *args, num_draft_tokens=None, **options):
        found.append(num_draft_tokens)
        return step(self, *args, num_draft_tokens=num_draft_tokens, **options)

    monkeypatch.setattr(Slots, "step", recorded)
    return found


class Gate:
    """A place in the threads that compile, where they wait until it is opened."""

    def __init__(self, monkeypatch):
        self.is_open, self.arrived, self.num_compiled = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(later_lengths, "LaterSteps", LaterSteps)
        compile_one = LaterSteps._compile

        def wait(steps, program):
            self.arrived.set()
            assert self.is_open.wait(60)
            compile_one(steps, program)
            self.num_compiled += 1

        monkeypatch.setattr(LaterSteps, "_compile", wait)


def compilers():
    return [thread for thread in threading.enumerate() if thread.name == "specjax compiler"]


@pytest.mark.usefixtures("all_programs")
def test_requests_are_served_while_steps_are_compiled(monkeypatch, used):
    """No request waits for a program, before and after all are there, and the tokens are the same."""
    gate = Gate(monkeypatch)
    with engine_of(step_times=ONE_IS_BEST) as engine:
        with Compilations() as early:
            first = engine.submit([5, 6, 7], PARAMS).result(timeout=60)
        assert set(used) <= {0, 2} and early.number == early.number_traced == 0
        with pytest.raises(TimeoutError):
            engine.wait_for_draft_lengths(timeout=0.01)
        gate.is_open.set()
        engine.wait_for_draft_lengths(timeout=60)
        used.clear()
        with Compilations() as late:
            second = engine.submit([5, 6, 7], PARAMS).result(timeout=60)
        assert 1 in used and late.number == late.number_traced == 0
    assert first.token_ids == second.token_ids
    assert gate.num_compiled == 1 and not compilers()


@pytest.mark.usefixtures("all_programs")
def test_an_engine_goes_on_where_steps_do_not_compile(monkeypatch, used, caplog):
    gate = Gate(monkeypatch)

    def fail(*_):
        raise ZeroDivisionError("no program")

    with engine_of(step_times=ONE_IS_BEST) as engine:
        monkeypatch.setattr(Slots, "lowered", fail)
        gate.is_open.set()
        expected = "the steps of 1 draft tokens do not compile, and those of 0 and 2 go on: no program"
        with pytest.raises(RuntimeError, match=expected) as raised:
            engine.wait_for_draft_lengths(timeout=60)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [expected]
        assert len(engine.submit([5, 6, 7], PARAMS).result(timeout=60).token_ids) == 20
        assert set(used) <= {0, 2}


def test_closing_waits_for_one_program(monkeypatch):
    """The others are not begun, and whoever waits for them hears that they will not come."""
    gate = Gate(monkeypatch)
    engine = engine_of(step_times=ONE_IS_BEST, warm_up=None)
    gate.arrived.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.wait_for_draft_lengths(timeout=60)
    assert len(compilers()) == 1 and closing.is_alive()
    gate.is_open.set()
    closing.join(60)
    assert gate.num_compiled == 1 and not compilers()


def test_seconds_are_measured_without_requests(monkeypatch, tmp_path):
    """Until then they lie on a line, and prompts that are known stay known."""
    monkeypatch.setattr(step_times, "_known", {})
    monkeypatch.setattr(step_times.compilation_cache, "used_folder", lambda: str(tmp_path))
    monkeypatch.setattr(step_times, "STEPS", 1)
    monkeypatch.setattr(step_times, "REPEATS", 1)
    gate = Gate(monkeypatch)
    monkeypatch.setattr(Slots, "steps", lambda *_: [None])
    monkeypatch.setattr(Slots, "lowered", lambda *_: jax.jit(lambda: 0).lower())
    sizes = {"max_length": MAX_LENGTH, "page_size": PAGE_SIZE, "chunk_size": CHUNK, "num_pages": NUM_PAGES}
    with engine_of(make(0), eos_token_ids=EOS, **sizes) as engine:
        choice, prompt = engine._scheduler._draft_length, [*range(1, 2 * CHUNK + 4)]
        seconds = choice.times.at(1)
        assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
        first = engine.submit(prompt, PARAMS).result(timeout=60)
        # The device does not know of stop strings, and goes on with the slot.
        engine.submit(prompt, replace(PARAMS, stop=first.text[3])).result(timeout=60)
        pool = engine._tables._pool
        written, active, kept = [], [], set(pool._cached)
        set_pages = Slots.set_pages

        def recorded(slots, table):
            written.extend(table[table < NUM_PAGES].tolist())
            active.append(np.asarray(slots.state.context.active).any())
            set_pages(slots, table)

        monkeypatch.setattr(Slots, "set_pages", recorded)
        assert kept and not list(tmp_path.iterdir())
        gate.is_open.set()
        engine.wait_for_draft_lengths(timeout=60)
        assert written and not kept & set(written) and not any(active)
        (path,) = tmp_path.iterdir()
        assert StepTimes.load(path) == choice.times and choice.times.at(1) != seconds
        second = engine.submit(prompt, PARAMS).result(timeout=60)
    assert second.token_ids == first.token_ids and second.num_cached_tokens == 2 * CHUNK


def test_nothing_is_measured_where_prompts_have_all_pages():
    device = SimpleNamespace(draft_lengths=(1, 0), steps=lambda *_: [])
    choice = SimpleNamespace(allow=lambda lengths: None)
    options = {"first": (0,), "measurement": SimpleNamespace(times=None), "settings": nullcontext}
    later = LaterLengths(device, choice, None, **options, send=lambda function, *given: function(*given))
    assert later.can_measure and not later.settled.done()
    later.measure(SimpleNamespace(lend_device=lambda: []), lambda: True)
    assert not later.can_measure and later.settled.done()


def test_a_measurement_ends_when_requests_come():
    """The parts before stay measured."""
    device = Slots(bigram(), proposers.ngram(2), num_slots=1, max_length=24, capacities=FEW, draft_lengths=LENGTHS)
    measurement = step_times.Measurement(device, (1,), Needs.GREEDY, LENGTHS)
    measurement.advance()
    num_left, answers = len(measurement._left), iter([True, True, False])
    measurement.advance(goes_on=lambda: next(answers))
    assert len(measurement._left) == num_left and next(answers, None) is None
    assert not np.asarray(device.state.context.active).any()
    assert measurement.complete().at(1).keys() == set(LENGTHS)


def test_lines_between_known_seconds():
    times = interpolated(StepTimes({1: {0: 1.0, 8: 3.0}, 64: {0: 2.0, 8: 18.0}}), (8, 4, 2, 0))
    assert times.seconds == {1: {0: 1.0, 2: 1.5, 4: 2.0, 8: 3.0}, 64: {0: 2.0, 2: 6.0, 4: 10.0, 8: 18.0}}


def test_the_first_numbers_are_the_smallest_and_the_largest(monkeypatch):
    assert first_lengths((8, 4, 2, 0), is_by_times=True) == (0, 8)
    assert first_lengths((8, 4, 2, 0), is_by_times=False) == (8, 4, 2, 0)
    assert first_lengths((3,), is_by_times=True) == (3,)
    assert first_lengths((11, 8, 4, 0), is_by_times=True, longest=9) == (0, 8)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert first_lengths((8, 4, 2, 0), is_by_times=True) == (8, 4, 2, 0)


def test_a_choice_is_among_the_numbers_that_are_allowed():
    """Trees among them."""
    logits = np.zeros((1, 40, 40), np.float32)
    drafter = proposers.draft_model(testing.bigram_model(jnp.asarray(logits[0])), 2, tree=7, coupled=True)
    for best in (1, 2, 4, 6):
        lengths = (0, 1, 2, 4, 6)
        choice = ByStepTimes(StepTimes({1: {k: 0.1 if k == best else 1.0 for k in lengths}}), lengths, drafter)
        choice.allow((0, 6) if best != 6 else (0, 2))
        assert best not in {choice.choose(1, 0) for _ in range(50)}
        choice.allow(lengths)
        assert best in {choice.choose(1, 0) for _ in range(5)}


def test_threads_leave_python_to_others(monkeypatch):
    """Turns are short while programs are traced, no garbage is searched, and the numbers come in their order."""
    seen, admitted, before = [], [], sys.getswitchinterval()
    monkeypatch.setattr(garbage, "_num_open", 0)

    def lowered(program):
        seen.append((program, sys.getswitchinterval() == pytest.approx(TURN), gc.isenabled(), settings.is_active))
        return SimpleNamespace(compile=lambda: None)

    @contextmanager
    def settings():
        settings.is_active = True
        yield

    programs = {2: ["a", "b"], 4: [], 6: ["c"]}
    device, options = SimpleNamespace(lowered=lowered), {"admit": admitted.append, "fail": None}
    LaterSteps(device, programs, **options, settings=settings).join()
    assert sorted(seen) == [(program, True, False, True) for program in "abc"]
    assert sorted(admitted) == [2, 4, 6] and admitted[0] == 4
    assert sys.getswitchinterval() == before and gc.isenabled()
    with short_turns(), nullcontext(), short_turns():
        pass
    assert sys.getswitchinterval() == before
