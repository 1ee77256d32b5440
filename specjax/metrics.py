"""Counts of a decoding run, which are summed on the device, and the metrics that are computed from them at its end.

Shapes: B sequences, K draft tokens. A draft counts as accepted if it and all drafts before it are accepted. Only the
noncausal acceptance rate counts each draft by its own test; it needs a verifier that reports these tests
(`outcomes=True`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from specjax.types import Array
from specjax.validation import check_array, is_integer
from specjax.validation.extras import needs

__all__ = [
    "Totals",
    "acceptance_rate",
    "acceptance_rate_per_position",
    "mean_acceptance_length",
    "noncausal_acceptance_rate",
    "plot",
    "system_efficiency",
    "update",
    "zeros",
]


class Totals(NamedTuple):
    """Counts of each sequence of a batch since its first step.

    The counts of one sequence are `jax.tree.map(lambda x: x[row], totals)`.
    """

    drafted: Array  # [B] int32, draft tokens proposed
    accepted: Array  # [B] int32, draft tokens accepted
    emitted: Array  # [B] int32, tokens committed to the output
    row_steps: Array  # [B] int32, steps in which the row had at least one draft
    steps: Array  # [B] int32, steps in which the row was active
    drafted_at: Array  # [B, K] int32, steps with a draft at this index
    accepted_at: Array  # [B, K] int32, steps in which the draft at this index was accepted
    tested: Array  # [B] int32, draft tokens whose own test the verifier reported
    passed: Array  # [B] int32, draft tokens that passed their own test


def zeros(batch_size: int, num_draft_tokens: int) -> Totals:
    """Return the totals of a run that has not started, all zero.

    Args:
        batch_size: B.
        num_draft_tokens: K; 0 is plain decoding.

    Raises:
        ValueError: a number is not an integer >= 0.

    Example:
        >>> zeros(2, 4).accepted_at.shape
        (2, 4)
    """
    for name, number in (("batch_size", batch_size), ("num_draft_tokens", num_draft_tokens)):
        if not (is_symbolic_dim(number) or (is_integer(number) and number >= 0)):
            raise ValueError(f"{name} must be an integer >= 0, got {number!r}")
    rows, positions = (batch_size,), (batch_size, num_draft_tokens)
    return Totals(*(jnp.zeros(shape, jnp.int32) for shape in [rows] * 5 + [positions] * 2 + [rows] * 2))


def update(
    totals: Totals,
    num_drafts: Array,
    num_accepted: Array,
    num_emitted: Array,
    active: Array,
    is_accepted: Array | None = None,
) -> Totals:
    """Add the counts of one step to the totals. The function is pure and works inside jit.

    Args:
        totals: the counts so far.
        num_drafts: [B] int32 in [0, K], number of drafts that were verified.
        num_accepted: [B] int32, number of drafts that were accepted.
        num_emitted: [B] int32, number of committed tokens, which is less than num_accepted + 1 where the output ended
            inside the step.
        active: [B] bool; rows that are not active add nothing.
        is_accepted: [B, K] bool, the outcome of each draft's own test (`Verified.is_accepted`), or None.

    Returns:
        The new totals.

    Raises:
        ValueError: an argument has another shape or dtype.

    Example:
        >>> totals = update(zeros(1, 3), jnp.array([3]), jnp.array([2]), jnp.array([3]), jnp.array([True]))
        >>> totals.accepted_at
        Array([[1, 1, 0]], dtype=int32)
    """
    batch_size, num_draft_tokens = _checked(totals).drafted_at.shape
    step = {"num_drafts": num_drafts, "num_accepted": num_accepted, "num_emitted": num_emitted}
    for name, value in step.items():
        check_array(name, value, "[B]", (batch_size,), jnp.integer)
    check_array("active", active, "[B]", (batch_size,), np.bool)

    counts = num_drafts, num_accepted, num_emitted
    drafted, accepted, emitted = (jnp.where(active, count, 0).astype(jnp.int32) for count in counts)
    index = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, :]
    is_draft = index < drafted[:, None]
    tested, passed = jnp.zeros_like(drafted), jnp.zeros_like(drafted)
    if is_accepted is not None:
        check_array("is_accepted", is_accepted, "[B, K]", (batch_size, num_draft_tokens), np.bool)
        tested, passed = drafted, jnp.sum(is_accepted & is_draft, axis=1, dtype=jnp.int32)
    added = Totals(
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        row_steps=drafted > 0,
        steps=active,
        drafted_at=is_draft,
        accepted_at=index < accepted[:, None],
        tested=tested,
        passed=passed,
    )
    return jax.tree.map(lambda total, count: total + jnp.asarray(count, total.dtype), totals, added)


def acceptance_rate(totals: Totals) -> float:
    """Compute the share of the drafts that was accepted.

    Args:
        totals: the counts of a batch or of one of its sequences.

    Returns:
        accepted / drafted, or NaN if nothing was drafted.

    Example:
        >>> totals = update(zeros(1, 4), jnp.array([4]), jnp.array([3]), jnp.array([4]), jnp.array([True]))
        >>> acceptance_rate(totals)
        0.75
    """
    totals = _checked(totals)
    return float(_ratio(_sum(totals.accepted), _sum(totals.drafted)))


def mean_acceptance_length(totals: Totals) -> float:
    """Compute the mean number of tokens that a verification emitted per sequence, over the steps with drafts.

    Args:
        totals: the counts of a batch or of one of its sequences.

    Returns:
        1 + accepted / row_steps, in [1, K+1], or NaN if nothing was drafted.

    Example:
        >>> totals = update(zeros(1, 4), jnp.array([4]), jnp.array([3]), jnp.array([4]), jnp.array([True]))
        >>> mean_acceptance_length(totals)
        4.0
    """
    totals = _checked(totals)
    return float(1 + _ratio(_sum(totals.accepted), _sum(totals.row_steps)))


def system_efficiency(totals: Totals) -> float:
    """Compute the number of emitted tokens as a share of the number with every draft accepted.

    Only steps with drafts count. Each counts its accepted drafts and one more token, even if the output ended sooner.

    Args:
        totals: the counts of a batch or of one of its sequences.

    Returns:
        (accepted + row_steps) / (drafted + row_steps), in (0, 1], or NaN if nothing was drafted.

    Example:
        >>> totals = update(zeros(1, 4), jnp.array([4]), jnp.array([3]), jnp.array([4]), jnp.array([True]))
        >>> system_efficiency(totals)
        0.8
    """
    totals = _checked(totals)
    accepted, drafted, row_steps = (_sum(count) for count in (totals.accepted, totals.drafted, totals.row_steps))
    return float(_ratio(accepted + row_steps, drafted + row_steps))


def acceptance_rate_per_position(totals: Totals) -> np.ndarray:
    """Compute, for each draft index, the share of the steps with a draft at this index in which it was accepted.

    Args:
        totals: the counts of a batch or of one of its sequences.

    Returns:
        [K] float64, NaN at an index where nothing was drafted.

    Example:
        >>> totals = update(zeros(1, 3), jnp.array([2]), jnp.array([1]), jnp.array([2]), jnp.array([True]))
        >>> acceptance_rate_per_position(totals)
        array([ 1.,  0., nan])
    """
    totals = _checked(totals)
    return _ratio(*(np.atleast_2d(count).sum(axis=0) for count in (totals.accepted_at, totals.drafted_at)))


def noncausal_acceptance_rate(outcomes: Totals | Array, num_drafts: Array | None = None) -> float:
    """Compute the share of the drafts that pass their own test, whether or not the drafts before them pass.

    Args:
        outcomes: the counts of a batch or of one of its sequences; or the outcome of each draft's own test, [..., K]
            bool, which is not read past the drafts of a row.
        num_drafts: [...] int32 in [0, K], the number of drafts of each row, given with an array of outcomes.

    Returns:
        passed / tested, or NaN if nothing was drafted or the verifier did not report the tests.

    Raises:
        ValueError: the outcomes are neither counts nor true and false, or `num_drafts` is not of integers in [0, K] in
            the shape [...] of the outcomes without their last axis.

    Example:
        >>> noncausal_acceptance_rate([[True, True, True, False, True]], [5])
        0.8
    """
    if isinstance(outcomes, Totals):
        return float(_ratio(_sum(outcomes.passed), _sum(outcomes.tested)))
    try:
        is_accepted, counts = np.asarray(outcomes), np.asarray(num_drafts)
    except ValueError:
        raise ValueError(
            f"outcomes and num_drafts must be arrays, got lists of several lengths, {outcomes!r} and {num_drafts!r}"
        ) from None
    is_outcome = is_accepted.dtype == bool or (is_accepted.dtype.kind in "iuf" and np.isin(is_accepted, (0, 1)).all())
    if is_accepted.ndim == 0 or not is_outcome:
        got = f"{is_accepted.dtype} {is_accepted.shape}"
        raise ValueError(f"outcomes must be Totals or an array [..., K] of true and false, or of 1 and 0, got {got}")
    is_accepted = is_accepted.astype(bool)
    shape, most = is_accepted.shape[:-1], is_accepted.shape[-1]
    if counts.shape != shape:
        raise ValueError(f"num_drafts must have shape {shape}, got {counts.shape}")
    if not np.issubdtype(counts.dtype, np.integer) or np.any((counts < 0) | (counts > most)):
        raise ValueError(f"num_drafts must be integers in [0, K = {most}], got {counts.tolist()}")
    is_draft = np.arange(is_accepted.shape[-1]) < counts[..., None]
    return float(_ratio(np.sum(is_accepted & is_draft), np.sum(counts)))


def plot(runs: Any) -> Any:
    """Draw the acceptance rate at each position of a draft, and the tokens a second, of runs.

    Args:
        runs: metrics of runs by their names, or the metrics of one run. Each has the fields of `LLM`'s metrics, of
            which `acceptance_rate_per_position` [K], `mean_acceptance_length` and `tokens_per_second` are drawn.

    Returns:
        A figure of Matplotlib, which a notebook shows and `figure.savefig` writes.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed, which the extra `plot` brings.
        ValueError: there are no runs, or one has no such metrics.
    """
    runs = runs if isinstance(runs, Mapping) else {"": runs}
    if not runs:
        raise ValueError("runs must hold the metrics of at least one run, got none")
    for run in runs.values():
        if not hasattr(run, "acceptance_rate_per_position"):
            raise ValueError(f"runs must be metrics, as results of LLM have them, or a mapping to them, got {run!r}")
    with needs("plot"):
        from matplotlib import pyplot
    figure, (rates, speeds) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for i, (name, run) in enumerate(runs.items()):
        of_drafts = run.acceptance_rate_per_position
        if len(of_drafts):
            rates.plot(range(1, len(of_drafts) + 1), of_drafts, marker="o", color=f"C{i}", label=name)
        (bar,) = speeds.barh([i], [run.tokens_per_second], height=0.5, color=f"C{i}")
        if not np.isnan(run.mean_acceptance_length):
            speeds.bar_label(speeds.containers[-1], [f"{run.mean_acceptance_length:.2f} tokens a step"], padding=4)
        speeds.set_xlim(0, max(speeds.get_xlim()[1], 1.6 * bar.get_width()))
    longest = max(len(run.acceptance_rate_per_position) for run in runs.values())
    rates.set(xlabel="position of the draft token", ylabel="acceptance rate", ylim=(0, 1.05))
    rates.set_xticks(range(1, longest + 1))
    if any(runs):
        rates.legend()
    speeds.set(xlabel="tokens/s", ylim=(len(runs) - 0.4, -0.6))
    speeds.set_yticks(range(len(runs)) if any(runs) else [], [name for name in runs if name])
    for axes in (rates, speeds):
        axes.spines[["top", "right"]].set_visible(False)
    pyplot.close(figure)  # else a notebook shows it twice
    return figure


def _checked(totals):
    if not isinstance(totals, Totals):
        raise ValueError(f"totals must be Totals, as zeros returns it, got {type(totals).__name__}")
    return totals


def _sum(count):
    return np.asarray(count).sum()  # on the host in int64, which does not overflow


def _ratio(part, whole):
    return part / np.where(whole > 0, whole, np.nan)
