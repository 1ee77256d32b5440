"""One loop of training: stages of jitted steps, a clock without the time of compiling, and checkpoints.

The loop knows neither models nor optimisers: a step is a function of parameters, the state of an optimiser and a batch.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.types import PyTree
from specjax.validation.arguments import is_integer
from specjax.validation.extras import needs


@dataclass(frozen=True)
class Stage:
    """A jitted step and its batches, from a share of the run on.

    `step` is called as `step(params, state, batch, number, rate)`, with the number of the first step of the call as an
    int32 scalar and the learning rate as a float32 scalar. It returns parameters and state, which have the shapes,
    dtypes and shardings of the arguments, and losses, a pytree of arrays, for which the loop waits before the next
    call. It may donate its first two arguments.
    """

    step: Callable[..., tuple[PyTree, PyTree, PyTree]]
    batches: Callable[[int], PyTree]  # the batch of the call that begins with this step; each has the same shapes
    begin: float = 0.0  # share of the run
    num_steps: int = 1  # number of steps that a call of `step` takes


@dataclass(frozen=True)
class Progress:
    """State of a run at a report."""

    step: int  # number of steps taken, earlier runs included
    seconds: float  # time of training, earlier runs included
    share: float  # share of the run that is done, 1 at the end
    params: PyTree  # valid until the callback returns, if the step donates its arguments
    losses: PyTree | None = None  # losses that the last call returned; None before the first call
    steps_per_second: float = 0.0  # since the last report, without checkpoints and reports


def fit(
    params: PyTree,
    state: PyTree,
    stages: Sequence[Stage],
    rate: Callable[[float], float],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    every: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
    checkpoint: str | Path | None = None,
    seconds_per_save: float = 0.0,
    on_step: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[PyTree, PyTree]:
    """Train for a number of steps or of seconds.

    The clock stands still while the loop waits for a compiled program. The program of the next stage is compiled in
    another thread while a stage runs.

    A run that was cut off continues from its last checkpoint when `fit` is called again with the same arguments. If it
    goes by steps, it ends with the same parameters bit for bit.

    Args:
        params: initial parameters, a pytree of arrays of any shape.
        state: initial state of the optimiser, a pytree of arrays of any shape.
        stages: steps and batches, in the order of `begin`, which is 0 for the first stage.
        rate: learning rate as a function of the share of the run that is done, in [0, 1).
        steps: number of steps >= 1, or None.
        seconds: duration > 0, or None. Exactly one of `steps` and `seconds` is given.
        every: number of steps between two reports, >= 1.
        report: called before the first step, after at least `every` more steps, and at the end.
        checkpoint: directory of checkpoints, written with orbax-checkpoint; None writes none.
        seconds_per_save: time between two checkpoints; 0 writes one before each report. The last checkpoint is written
            at any rate.
        on_step: called after each call of a step, before reports. Its `steps_per_second` is measured since the last
            report.
        should_stop: called after each call of a step; where it returns True, the run writes a checkpoint, reports and
            ends. The same call of `fit` then continues it.

    Returns:
        Parameters and state after the last step.

    Raises:
        ValueError: a number is out of its range, or the stages do not begin in order.
        ModuleNotFoundError: `checkpoint` is given and the package orbax-checkpoint is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> @jax.jit
        ... def step(params, state, batch, number, rate):
        ...     loss, gradient = jax.value_and_grad(lambda x: jnp.sum((x - batch) ** 2))(params)
        ...     return params - rate * gradient, state, loss
        >>> stage = Stage(step, lambda number: np.ones(2, np.float32))
        >>> params, _ = fit(jnp.zeros(2), (), [stage], lambda share: 0.5 * (1 - share), steps=4)
        >>> params
        Array([1., 1.], dtype=float32)
    """
    _check(stages, steps, seconds, every)

    def share_at(step: int, spent: float) -> float:
        return min(1.0, step / steps if steps is not None else spent / (seconds or 1))

    with ExitStack() as stack:
        manager = None if checkpoint is None else stack.enter_context(_manager(checkpoint))
        programs = _Programs(stages, stack.enter_context(ThreadPoolExecutor(1)))
        step, spent = 0, 0.0
        if manager is not None and manager.latest_step() is not None:
            step = manager.latest_step()
            params, state, kept = restore(manager, step, (params, state, np.float64(0)))
            spent = float(kept)
        share = share_at(step, spent)
        report(Progress(step, spent, share, params))
        clock, saved, reported, busy = _Clock(spent), spent, step, 0.0
        while share < 1:
            number = [i for i, stage in enumerate(stages) if stage.begin <= share][-1]
            began, stage = clock.seconds(), stages[number]
            inputs = [params, state, stage.batches(step), np.int32(step), np.float32(rate(share))]
            with clock.stopped():
                program = programs.get(number, inputs)
            params, state, losses = program(*inputs)
            jax.block_until_ready(losses)
            step, spent = step + stage.num_steps, clock.seconds()
            busy += spent - began
            share = share_at(step, spent)
            # A run that ended is not continued: its checkpoint has the whole duration, however late the last step is.
            spent = spent if seconds is None else min(spent, seconds)
            now = Progress(step, spent, share, params, losses, (step - reported) / max(busy, 1e-9))
            on_step(now)
            is_over = should_stop() or share == 1
            is_due = is_over or step // every != reported // every
            is_late = spent - saved >= seconds_per_save if seconds_per_save else is_due
            if manager is not None and (is_over or is_late):
                save(manager, step, (params, state, np.float64(spent)))
                saved = spent
            if is_due:
                report(now)
                reported, busy = step, 0.0
            if is_over:
                break
    return params, state


def _check(stages: Sequence[Stage], steps: int | None, seconds: float | None, every: int) -> None:
    """Raise ValueError for arguments of `fit` that are out of their range."""
    if (steps is None) == (seconds is None):
        raise ValueError(f"give exactly one of steps and seconds, got {steps!r} and {seconds!r}")
    for name, value in (("steps", steps), ("every", every)):
        if value is not None and (not is_integer(value) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be a number > 0, got {seconds!r}")
    begins = [stage.begin for stage in stages]
    if begins[:1] != [0] or begins != sorted(begins):
        raise ValueError(f"stages must begin at 0 and in ascending order, got {begins}")


class _Clock:
    """Seconds of a run, earlier runs included, without the time for which the clock was stopped."""

    def __init__(self, spent: float):
        self._start = time.perf_counter() - spent

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began


class _Programs:
    """The compiled steps of stages; each is compiled in another thread while the stage before it runs."""

    def __init__(self, stages: Sequence[Stage], pool: ThreadPoolExecutor):
        self._stages, self._pool = stages, pool
        self._futures: dict[int, Future[Callable[..., tuple[PyTree, PyTree, PyTree]]]] = {}

    def get(self, number: int, inputs: Sequence[Any]) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
        """Return the program of a stage when it is compiled, and have the next one compiled for such inputs."""
        for i in range(number, min(number + 2, len(self._stages))):
            if i not in self._futures:
                params, state, batch, step, rate = inputs
                batch = batch if i == number else self._stages[i].batches(int(step))
                # Shapes in place of arrays, which a step donates while the other thread reads them.
                shapes = jax.tree.map(_shape, [params, state, batch, step, rate])
                self._futures[i] = self._pool.submit(compile_step, self._stages[i].step, shapes)
        return self._futures[number].result()


def compile_step(step: Any, shapes: Sequence[PyTree]) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """Compile a jitted step for arguments of these shapes."""
    return step.lower(*shapes).compile()


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf, and its sharding if it is committed to devices."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))


def _manager(directory: str | Path) -> Any:
    """Return the orbax CheckpointManager of a directory, which keeps the last two checkpoints."""
    with needs("train"):
        import orbax.checkpoint as ocp
    return ocp.CheckpointManager(Path(directory).resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(manager: Any, step: int, tree: PyTree) -> None:
    """Write a checkpoint that is whole when this returns."""
    import orbax.checkpoint as ocp

    manager.save(step, args=ocp.args.StandardSave(jax.tree.leaves(tree)))
    manager.wait_until_finished()


def restore(manager: Any, step: int, like: PyTree) -> PyTree:
    """Read a checkpoint into the structure, and on the devices, of `like`."""
    import orbax.checkpoint as ocp

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten(manager.restore(step, args=ocp.args.StandardRestore(leaves)))
