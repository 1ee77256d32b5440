"""The exact distribution of a verifier's output, by enumeration of all random outcomes.

A verifier made by `specjax.verifiers.from_core` makes all its random choices through a `Draw`. Here another draw takes
its place, which goes through every outcome and computes its probability. So the code that is checked is the code that
users run, and an error of 1e-6 in a probability shows.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.distributions import Residual
from specjax.types import Array, Categorical, Draft, DraftTree, Verified
from specjax.verifiers.core import CallNumbers, CoreVerifier

MAX_ROWS = 4_000_000  # the most outcomes of a batch that are enumerated at once
Table = np.ndarray  # level i of a conditional table: [V] * i + [V], a row over token i + 1 for every first i tokens


class _Call(NamedTuple):
    """A call of a draw, which chooses `size` times among `number`."""

    method: str
    number: int
    size: int

    def choices(self) -> np.ndarray:
        """Return all possible outcomes."""
        if self.method == "pick":
            return np.arange(self.number, dtype=np.int32)
        dtype = bool if self.method == "flip" else np.int32
        return np.array(list(product(range(self.number), repeat=self.size)), dtype)


class _OtherCalls(Exception):
    """A verifier makes other calls than expected."""


class _Enumerated:
    """A draw whose calls return given outcomes, and whose `weight` [B] is the probability of these outcomes.

    Args:
        outcomes: the outcomes of the calls in their order, each [B, ...]. Calls for which none is given return their
            first possible outcome, and are added to `unknown`.
        expected: the calls that have these outcomes, all outside loops; others raise `_OtherCalls`. None is unknown.
    """

    def __init__(self, outcomes: Sequence[Array | np.ndarray], expected: tuple[_Call, ...] | None = None):
        self.weight: Array | float = 1.0
        self.unknown: list[_Call] = []
        self.has_loop = False
        self._outcomes = iter(outcomes)
        self._expected = None if expected is None else iter(expected)
        self._calls = CallNumbers()
        self._numbers: set[tuple[str, int]] = set()
        self.nodes: list[Array] = []  # of the calls of `flip` that name them, each [B, K]
        self.is_unfinished: Array | np.ndarray = np.zeros((), bool)  # whether a loop reached its limit

    def flip(self, probabilities: Array, *, index: Array | int | None = None, node: Array | None = None) -> Array:
        width = probabilities.shape[1]
        if node is not None:
            self.nodes.append(node)
        outcome = self._next(_Call("flip", 2, width), index, probabilities.shape[0], is_named=node is not None)
        chance = jnp.clip(jnp.where(jnp.isnan(probabilities), 0, probabilities), 0, 1)
        self.weight = self.weight * jnp.prod(jnp.where(outcome, chance, 1 - chance), axis=1)
        return outcome

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        batch_size, _, vocab_size = distributions.shape_of(residual.target.distribution)
        outcome = self._next(_Call("pick", vocab_size, 1), index, batch_size)
        probs = distributions.residual_probs(residual)
        self.weight = self.weight * jnp.take_along_axis(probs, outcome[:, None], axis=1)[:, 0]
        return outcome

    def sample(self, target: Categorical, *, index: Array | int | None = None, depth: Array | None = None) -> Array:
        batch_size, num_rows, vocab_size = distributions.shape_of(target)
        outcome = self._next(_Call("sample", vocab_size, num_rows), index, batch_size)
        normalized = distributions.normalize(target)
        chance = jnp.exp(distributions.token_log_prob(normalized, outcome))
        # A row without mass may return any token; here it returns token 0.
        is_first = (outcome == 0).astype(chance.dtype)
        chance = jnp.where(jnp.isfinite(normalized.log_mass), chance, is_first)
        self.weight = self.weight * jnp.prod(chance, axis=1)
        return outcome

    def loop(self, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any, limit: int) -> Any:
        for _ in range(limit):
            keep = goes_on(carry)
            carry = jax.tree.map(partial(jnp.where, keep), body(carry), carry)
        self.is_unfinished = self.is_unfinished | goes_on(carry)
        return carry

    def _next(self, call: _Call, index: Array | int | None, batch_size: int, is_named: bool = False) -> Array:
        """Return the outcome of a call: the next one that was given, or the first of the choices."""
        method = call.method
        number = 0 if is_named and index is None else self._calls.next(method, index)
        if self._calls.is_in_traced_function():
            self.has_loop = True
        elif is_named:
            pass
        elif (method, int(number)) in self._numbers:
            raise AssertionError(
                f"two calls of draw.{method} in one step have index={index}: they get the same noise, while every call "
                "must have noise of its own"
            )
        else:
            self._numbers.add((method, int(number)))
        if self._expected is not None and (self.has_loop or next(self._expected, None) != call):
            raise _OtherCalls
        outcome = next(self._outcomes, None)
        if outcome is None:
            self.unknown.append(call)
            outcome = np.repeat(call.choices()[:1], batch_size, axis=0)
        return jnp.asarray(outcome)

    def assert_all_called(self) -> None:
        """Raise `_OtherCalls` where an expected call was not made."""
        if self._expected is not None and next(self._expected, None) is not None:
            raise _OtherCalls


# The calls of verifiers without draws in loops, by the form of drafts. They seldom depend on more than this form has;
# where they do, the program that replays them finds it as it is traced. So most verifiers are traced once a form.
_calls_of: dict[tuple, tuple[_Call, ...]] = {}


def enumerate_outcomes(
    verifier: Callable[..., Verified],
    draft: Draft | DraftTree,
    target: Categorical | Array,
    *,
    bonus_tokens: Array | None = None,
    **options: Any,
) -> tuple[Verified, np.ndarray]:
    """Run a verifier on every outcome of its random choices.

    A core that draws inside loops runs operation by operation, with the loops in Python, because only then the number
    of its draws is known. Any other core is compiled.

    Args:
        verifier: a verifier that `from_core` made, of drafts or of trees.
        draft: the draft or the tree, B rows. Samples of a tree are enumerated independently for each node, although the
            nodes of a depth share their noise: a row's output may depend on one sample of a depth alone.
        target: the target's distributions, B rows.
        bonus_tokens: [B] int32, as verifiers of drafts take them.
        **options: the verifier's options.

    Returns:
        Verified with a leading axis of B * N, the N outcomes of one row after the outcomes of another; and the
        probability [B, N] of each outcome.

    Raises:
        AssertionError: two calls of the core get the same noise.
        ValueError: `from_core` did not make the verifier, there are more than MAX_ROWS outcomes, or a call inside a
            loop has no index.
    """
    if not isinstance(verifier, CoreVerifier):
        raise ValueError(f"verifier must be one that from_core made, got {verifier!r}")
    batch_size, *shape = draft.tokens.shape
    static = tuple((k, v) for k, v in options.items() if v is None or isinstance(v, bool | str | int))
    traced = {k: v for k, v in options.items() if (k, v) not in static}
    rows = draft, distributions.as_categorical(target), bonus_tokens
    form = verifier, *shape, rows[1].logits.shape[-1], draft.distribution is None

    def repeated(calls: Sequence[_Call]) -> tuple[list[np.ndarray], Any, int]:
        outcomes, num_outcomes = _product([call.choices() for call in calls], batch_size)
        return outcomes, jax.tree.map(lambda x: np.repeat(np.asarray(x), num_outcomes, axis=0), rows), num_outcomes

    def result(num_outcomes: int, verified: Verified, weight: Any, nodes: list[Array], is_unfinished: Any):
        _check_coins(nodes, is_unfinished)
        weight = np.broadcast_to(weight, (batch_size * num_outcomes,))
        return verified, weight.reshape(batch_size, num_outcomes)

    def replayed(calls: tuple[_Call, ...]) -> tuple[Verified, np.ndarray]:
        outcomes, given, num_outcomes = repeated(calls)
        return result(num_outcomes, *_replay(verifier, static, calls, traced, outcomes, *given))

    if form in _calls_of:
        try:
            return replayed(_calls_of[form])
        except (_OtherCalls, ValueError):  # or too many outcomes, perhaps because the calls are others
            del _calls_of[form]
    draws: list[_Enumerated] = []

    def trace_calls() -> None:
        draws.append(_Enumerated([]))
        _run(verifier, draws[-1], options, *rows)

    jax.eval_shape(trace_calls)
    if not draws[-1].has_loop:
        _calls_of[form] = tuple(draws[-1].unknown)
        return replayed(_calls_of[form])
    calls: list[_Call] = []
    while True:
        outcomes, given, num_outcomes = repeated(calls)
        draw = _Enumerated(outcomes)
        with jax.disable_jit():
            verified = _run(verifier, draw, options, *given)
        if not draw.unknown:
            return result(num_outcomes, verified, draw.weight, draw.nodes, draw.is_unfinished)
        calls += draw.unknown


def _run(verifier, draw, options, *rows):
    return verifier.with_draw(draw, *jax.tree.map(jnp.asarray, rows), **options)


@partial(jax.jit, static_argnames=("verifier", "static", "calls"))
def _replay(verifier, static, calls, traced, outcomes, *rows):
    draw = _Enumerated(outcomes, calls)
    verified = _run(verifier, draw, dict(static) | traced, *rows)
    draw.assert_all_called()
    return verified, draw.weight, draw.nodes, draw.is_unfinished


def _check_coins(nodes: list[Array], is_unfinished: Array) -> None:
    """Raise AssertionError where a node has two coins, or where a loop should have gone on."""
    coins = np.concatenate([np.asarray(node) for node in nodes], axis=1) if nodes else np.zeros((0, 0))
    coins = np.sort(coins, axis=1)
    if np.any((coins[:, 1:] == coins[:, :-1]) & (coins[:, 1:] > 0)):  # 0 and -1 stand for rows that are done
        raise AssertionError(
            "two calls of draw.flip in one step have the same node: they get the same noise, while every call must "
            "have other noise"
        )
    if np.any(is_unfinished):
        raise AssertionError("draw.loop must end within its limit, got a carry at which goes_on is still true")


def _product(choices: list[np.ndarray], batch_size: int) -> tuple[list[np.ndarray], int]:
    """Combine the choices of all calls in every way, for each row of the batch.

    Returns:
        The outcomes [B * N, ...] of each call, and the number N of combinations.

    Raises:
        ValueError: B * N is larger than MAX_ROWS.
    """
    sizes = [len(each) for each in choices]
    num_outcomes = math.prod(sizes)
    if batch_size * num_outcomes > MAX_ROWS:
        raise ValueError(
            f"the core must have at most {MAX_ROWS} outcomes over the batch, got {batch_size} rows of {sizes} choices: "
            "take fewer draft tokens or rows"
        )
    index = np.indices(sizes).reshape(len(sizes), num_outcomes)
    outcomes = [
        np.tile(each[i], (batch_size,) + (1,) * (each.ndim - 1)) for each, i in zip(choices, index, strict=True)
    ]
    return outcomes, num_outcomes


def enumerate_law(
    verifier: Callable[..., Verified],
    target: Sequence[Table],
    draft: Sequence[Table] | Sequence[int],
    *,
    num_tokens: int | None = None,
    dtype: Any = jnp.float32,
    target_temperature: float | None = None,
    draft_temperature: float | None = None,
    min_logit: float | None = None,
    **options: Any,
) -> np.ndarray:
    """Compute the exact joint distribution of the next K+1 tokens.

    These are the tokens that one step emits and, up to K+1, tokens drawn from the target after them.

    Args:
        verifier: a verifier that `from_core` made.
        target: conditional logits of the target, levels 0 to K; level i has shape [V] * (i + 1).
        draft: conditional logits of the draft, levels 0 to K-1; or K token ids of deterministic drafts.
        num_tokens: the number of drafts that the row has, at most K; None is K.
        dtype: the dtype of the logits that the verifier gets.
        target_temperature: the temperature of the target; None is 1.
        draft_temperature: the temperature of the draft; None is 1.
        min_logit: the cut of all rows of target and draft; None is no cut.
        **options: the verifier's options.

    Returns:
        float64 array [V] * (K + 1). The law of a lossless verifier equals `product_law` of the target's probabilities.

    Raises:
        AssertionError: two calls of the core get the same noise.
        ValueError: there are more than MAX_ROWS outcomes, or a call inside a loop has no index.
    """
    num_draft_tokens, vocab_size = len(target) - 1, target[0].shape[-1]
    drafted = draft_tables(draft)
    paths = [tuple(map(int, draft))] if drafted is None else list(product(range(vocab_size), repeat=num_draft_tokens))
    batch_size = len(paths)

    def constant(value: float | int | None, kind: Any) -> Array | None:
        return None if value is None else jnp.full(batch_size, value, kind)

    def distribution(tables: Sequence[Table], temperature: float | None) -> Categorical:
        cut = None if min_logit is None else jnp.full((batch_size, len(tables)), min_logit, jnp.float32)
        return Categorical(jnp.asarray(rows_along(tables, paths), dtype), constant(temperature, jnp.float32), cut)

    rows = Draft(
        jnp.asarray(np.array(paths, np.int32).reshape(batch_size, num_draft_tokens)),
        None if drafted is None else distribution(drafted, draft_temperature),
        constant(num_tokens, jnp.int32),
    )
    scored = distribution(target, target_temperature)
    verified, weight = enumerate_outcomes(verifier, rows, scored, **options)
    target_probs = [probabilities(t, target_temperature, min_logit) for t in target]
    path_weight = np.ones(1)
    if drafted is not None:
        path_weight = path_probabilities([probabilities(t, draft_temperature, min_logit) for t in drafted], paths)
    return completed_law(verified.tokens, (path_weight[:, None] * weight).reshape(-1), target_probs)


def draft_tables(draft: Sequence[Table] | Sequence[int]) -> list[Table] | None:
    """Return the conditional tables of a sampled draft, and None for the token ids of deterministic drafts."""
    tables = [np.asarray(level) for level in draft]
    return tables if tables and tables[0].ndim > 0 else None


def rows_along(tables: Sequence[Table], paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the rows [N, levels, V] of conditional tables along N paths of tokens."""
    return np.stack([[table[path[:level]] for level, table in enumerate(tables)] for path in paths])


def path_probabilities(tables: Sequence[Table], paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the probability [N] of each of N paths of tokens, from conditional probabilities."""
    return np.array([np.prod([table[path[: i + 1]] for i, table in enumerate(tables)]) for path in paths])


def completed_law(tokens: Array, weight: np.ndarray, target: Sequence[Table]) -> np.ndarray:
    """Compute the joint distribution of emitted tokens, completed to K+1 tokens from the target.

    Args:
        tokens: [N, K+1] int32, N outputs of a verifier, each with -1 after its emitted tokens.
        weight: [N] float64, the probability of each output.
        target: conditional probabilities of the target, levels 0 to K.

    Returns:
        float64 array [V] * (K + 1).
    """
    joint = np.zeros((target[0].shape[-1],) * len(target))
    is_possible = weight != 0
    emitted, inverse = np.unique(np.asarray(tokens)[is_possible], axis=0, return_inverse=True)
    masses = np.bincount(inverse.reshape(-1), np.asarray(weight[is_possible], np.float64))
    for row, mass in zip(emitted, masses, strict=True):
        prefix = tuple(int(t) for t in row if t >= 0)
        joint[prefix] += mass * product_law(target, prefix)
    return joint


def probabilities(logits: Table, temperature: float | None = None, min_logit: float | None = None) -> np.ndarray:
    """Compute the softmax of logits / temperature over the last axis, in float64.

    Temperature 0 puts all mass on the largest logit, on the lowest id where several tie. Logits below `min_logit` and
    NaN are excluded.
    """
    logits = np.asarray(logits, np.float64)
    logits = np.where(logits >= (-np.inf if min_logit is None else min_logit), logits, -np.inf)
    if temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    logits = logits / (1.0 if temperature is None else temperature)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def row_probabilities(distribution: Categorical) -> np.ndarray:
    """Return the probabilities [B, T, V] of every row in float64, NaN in rows without mass."""
    assert distribution.rows is None, "the logits are not packed"
    logits, temperature = np.asarray(distribution.logits), distribution.temperature
    if distribution.min_logit is not None:
        logits = np.where(logits >= np.asarray(distribution.min_logit)[..., None], logits, -np.inf)
    values = np.ones(len(logits)) if temperature is None else np.asarray(temperature)
    with np.errstate(invalid="ignore"):
        return np.stack([probabilities(rows, value) for rows, value in zip(logits, values, strict=True)])


def product_law(tables: Sequence[Table], prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Compute the joint distribution of the tokens after `prefix`, from conditional probabilities.

    Args:
        tables: conditional probabilities; level i has shape [V] * (i + 1).
        prefix: the first tokens, which are given.

    Returns:
        float64 array [V] * (levels - len(prefix)).
    """
    joint = np.ones(())
    for table in tables[len(prefix) :]:
        joint = joint[..., None] * table[prefix]
    return joint


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the total variation of two distributions, which is half their L1 distance."""
    return 0.5 * float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).sum())
