"""The loop of training: stages, reports, the clock, and runs that continue from a checkpoint."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.training import Stage, fit, loop


@partial(jax.jit, donate_argnums=(0, 1))
def momentum(params, state, batch, number, rate):
    """A step of gradient descent on the squared distance to a batch [2] with noise that the step number decides."""
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), batch.shape)
    gradient = 2 * (params["x"] - batch) + 0.1 * noise
    state = 0.9 * state + gradient
    return {"x": params["x"] - rate * state}, state, jnp.sum((params["x"] - batch) ** 2)


def random_batch(step):
    return np.random.default_rng(step).normal(size=2).astype(np.float32)


def run(**options):
    """Train from zeros; gives the parameters and the state."""
    stages = options.pop("stages", [Stage(momentum, random_batch)])
    rate = options.pop("rate", lambda share: 0.1 * (1 - share))
    return jax.device_get(fit({"x": jnp.zeros(2)}, jnp.zeros(2), stages, rate, **options))


@pytest.fixture
def clock(monkeypatch):
    """A clock of the loop that goes on only when a test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_a_run_is_the_steps_by_hand():
    """At the rates of the schedule, on the batch of each step."""
    params, state, losses = {"x": jnp.zeros(2)}, jnp.zeros(2), []
    for step in range(7):
        rate = np.float32(0.1 * (1 - step / 7))
        params, state, loss = momentum(params, state, random_batch(step), np.int32(step), rate)
        losses.append(float(loss))
    seen = []
    found = run(steps=7, report=lambda now: seen.append((now.step, now.share, now.losses)))
    np.testing.assert_array_equal(found[0]["x"], params["x"])
    np.testing.assert_array_equal(found[1], state)
    assert [step for step, *_ in seen] == list(range(8))
    assert [share for _, share, _ in seen] == [step / 7 for step in range(8)]
    assert seen[0][2] is None and [float(loss) for *_, loss in seen[1:]] == losses


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_a_run_that_was_cut_off_ends_with_the_same_bits(cut, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    expected = run(steps=7, every=2, checkpoint=tmp_path / "whole")

    def stop(now):
        if now.step == cut:
            raise KeyboardInterrupt

    options = {"steps": 7, "every": 2, "checkpoint": tmp_path / "cut"}
    with pytest.raises(KeyboardInterrupt):
        run(**options, report=stop)
    steps = []
    found = run(**options, report=lambda now: steps.append(now.step))
    assert steps == [*range(cut, 7, 2), 7]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    steps.clear()
    again = run(**options, report=lambda now: steps.append((now.step, now.share)))
    assert steps == [(7, 1.0)]
    jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_stages_have_their_share_of_the_time(clock, monkeypatch):
    """Steps of one second in a run of ten; compiling takes no time, and a call of two steps counts as two."""

    def step(params, state, batch, number, rate):
        return params, state, (batch, number, rate)

    def slow_compile(step, shapes, compile_step=loop.compile_step):
        compiled = compile_step(step, shapes)

        def program(*inputs):
            clock.now += 1
            return compiled(*inputs)

        return program

    monkeypatch.setattr(loop, "compile_step", slow_compile)
    get = loop._Programs.get

    def wait(self, number, inputs):
        clock.now += 1000
        return get(self, number, inputs)

    monkeypatch.setattr(loop._Programs, "get", wait)
    stages = [
        Stage(jax.jit(step), lambda number: np.int32(10 + number)),
        Stage(jax.jit(step), lambda number: np.int32(20 + number), begin=0.6, num_steps=2),
    ]
    seen = []
    run(stages=stages, rate=lambda share: share, seconds=10, every=2, report=seen.append)
    assert [now.step for now in seen] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [now.seconds for now in seen] == [0, 2, 4, 6, 7, 8, 9, 10]
    batches, numbers, rates = zip(*[now.losses for now in seen[1:]], strict=True)
    assert [int(x) for x in batches] == [11, 13, 15, 26, 28, 30, 32]
    assert [int(x) for x in numbers] == [1, 3, 5, 6, 8, 10, 12]
    np.testing.assert_allclose([float(x) for x in rates], [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9], rtol=1e-6)
    assert [now.steps_per_second for now in seen[1:]] == [1, 1, 1, 2, 2, 2, 2]


def test_checkpoints_keep_their_distance(clock, tmp_path, monkeypatch):
    """The last one is written at any rate; time that a cut-off run spent counts."""
    pytest.importorskip("orbax.checkpoint")
    saved, save = [], loop.save

    def record(manager, step, tree):
        saved.append((step, float(tree[-1])))
        save(manager, step, tree)

    monkeypatch.setattr(loop, "save", record)

    def batch(step):
        clock.now += 1
        return random_batch(step)

    def stop(now):
        if now.step == 8:
            raise KeyboardInterrupt

    stages = [Stage(momentum, batch)]
    options = {"seconds": 10.5, "checkpoint": tmp_path, "seconds_per_save": 3, "stages": stages}
    with pytest.raises(KeyboardInterrupt):
        run(**options, report=stop)
    assert saved == [(3, 3.0), (6, 6.0)]
    run(**options)
    assert saved[2:] == [(9, 9.0), (11, 10.5)]


def test_a_run_that_is_asked_to_stop_goes_on_where_it_was(tmp_path):
    """It writes a checkpoint at the step where it was asked, whatever the distance of checkpoints and reports."""
    pytest.importorskip("orbax.checkpoint")
    steps = []
    options = {"steps": 5, "every": 10, "checkpoint": tmp_path / "cut", "seconds_per_save": 1e9}
    run(**options, on_step=lambda now: steps.append(now.step), should_stop=lambda: steps[-1] == 3)
    assert steps == [1, 2, 3]
    found = run(**options, on_step=lambda now: steps.append(now.step))
    assert steps[3:] == [4, 5]
    jax.tree.map(np.testing.assert_array_equal, found, run(steps=5))


def test_devices_share_a_batch():
    """Parameters stay on every device, and the run ends where one device ends."""
    devices = jax.devices("cpu")[:2]
    mesh = Mesh(np.array(devices), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def step(params, state, batch, number, rate):
        gradient = jnp.mean(params[None] - batch, axis=0)
        return params - rate * gradient, state, jnp.mean(batch)

    def rows(step):
        return np.random.default_rng(step).normal(size=(4, 3)).astype(np.float32)

    one, _ = fit(jnp.zeros(3), (), [Stage(jax.jit(step), rows)], lambda share: 0.5, steps=3)
    shared = Stage(jax.jit(step, out_shardings=whole), lambda number: jax.device_put(rows(number), split))
    both, _ = fit(jax.device_put(jnp.zeros(3), whole), (), [shared], lambda share: 0.5, steps=3)
    assert both.sharding.device_set == set(devices)
    np.testing.assert_allclose(one, both, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "give exactly one of steps and seconds, got None and None"),
        ({"steps": 3, "seconds": 1.0}, "give exactly one of steps and seconds, got 3 and 1.0"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 3, "every": 0.5}, "every must be an integer >= 1, got 0.5"),
        ({"seconds": float("nan")}, "seconds must be a number > 0, got nan"),
        ({"steps": 3, "stages": []}, r"stages must begin at 0 and in ascending order, got \[\]"),
        ({"steps": 3, "stages": [Stage(momentum, random_batch, b) for b in (0, 0.5, 0.2)]}, r"got \[0, 0.5, 0.2\]"),
    ],
)
def test_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)
