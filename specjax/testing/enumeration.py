"""The exact distribution of what a verifier emits, by enumeration of its chance.

A verifier made by `specjax.verifiers.from_core` takes all its chance from a `Draw`. Here the draw is replaced by one
that runs through every outcome with its probability, so the shipped code is what is checked, and an error of 1e-6
shows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.distributions import Residual
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers.core import CallNumbers, canonical

MAX_ROWS = 4_000_000  # outcomes of a batch that are enumerated at once
Table = np.ndarray  # level i of a conditional table: [V] * i + [V], the law of token i + 1 given the first i


class _Enumerated:
    """A draw whose every call gives the outcome that its row stands for; `weight` [B] is their probability.

    Args:
        outcomes: of the calls in their order, [B, ...] each. Later calls give their first outcome, and what they could
            give is added to `unknown`.
    """

    def __init__(self, outcomes: list[np.ndarray]):
        self.weight: Array | float = 1.0
        self.unknown: list[np.ndarray] = []
        self.has_loop = False
        self._outcomes = iter(outcomes)
        self._calls = CallNumbers()
        self._numbers: set[tuple[str, int]] = set()

    def flip(self, probabilities: Array, *, index: Array | int | None = None) -> Array:
        width = probabilities.shape[1]
        outcome = self._next("flip", index, probabilities.shape[0], lambda: product((False, True), repeat=width), bool)
        chance = jnp.clip(jnp.where(jnp.isnan(probabilities), 0, probabilities), 0, 1)
        self.weight = self.weight * jnp.prod(jnp.where(outcome, chance, 1 - chance), axis=1)
        return outcome

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        batch_size, _, vocab_size = distributions.shape_of(residual.target.distribution)
        outcome = self._next("pick", index, batch_size, lambda: range(vocab_size), np.int32)
        probs = distributions.residual_probs(residual)
        self.weight = self.weight * jnp.take_along_axis(probs, outcome[:, None], axis=1)[:, 0]
        return outcome

    def sample(self, target: Categorical, *, index: Array | int | None = None) -> Array:
        batch_size, num_rows, vocab_size = distributions.shape_of(target)
        rows = partial(product, range(vocab_size), repeat=num_rows)
        outcome = self._next("sample", index, batch_size, rows, np.int32)
        law = distributions.normalize(target)
        chance = jnp.exp(distributions.token_log_prob(law, outcome))
        chance = jnp.where(
            jnp.isfinite(law.log_mass), chance, (outcome == 0).astype(chance.dtype)
        )  # a row without mass gives some token
        self.weight = self.weight * jnp.prod(chance, axis=1)
        return outcome

    def _next(
        self, method: str, index: Array | int | None, batch_size: int, choices: Callable[[], Iterable], dtype: Any
    ) -> Array:
        """The outcome of a call: the next one that was given, or the first of the choices."""
        number = self._calls.next(method, index)
        if self._calls.is_in_traced_function():
            self.has_loop = True
        elif (method, int(number)) in self._numbers:
            raise AssertionError(
                f"two calls of draw.{method} in one step have index={index}: they get the same noise, while every call "
                "must have noise of its own"
            )
        else:
            self._numbers.add((method, int(number)))
        outcome = next(self._outcomes, None)
        if outcome is None:
            self.unknown.append(np.array(list(choices()), dtype))
            outcome = np.repeat(self.unknown[-1][:1], batch_size, axis=0)
        return jnp.asarray(outcome)


def enumerate_outcomes(
    verifier: Callable[..., Verified],
    draft: Draft,
    target: Categorical | Array,
    *,
    bonus_tokens: Array | None = None,
    **options: Any,
) -> tuple[Verified, np.ndarray]:
    """Run a verifier on every outcome of its chance.

    A core that draws inside loops runs operation by operation, with the loops in Python, because the number of its
    draws is known only then. Any other core is compiled.

    Args:
        verifier: with a `core` (made by `from_core`).
        draft: of B rows.
        target: of B rows.
        bonus_tokens: [B] int32, as verifiers take them.
        **options: of the verifier.

    Returns:
        Verified with a leading axis of B * N outcomes, those of one row together, and the probability [B, N] of each.

    Raises:
        AssertionError: two calls of the core get the same noise.
        ValueError: there are more than MAX_ROWS outcomes, or a call inside a loop has no index.
    """
    batch_size = draft.tokens.shape[0]
    static = tuple((k, v) for k, v in options.items() if v is None or isinstance(v, bool | str))
    traced = {k: v for k, v in options.items() if (k, v) not in static}
    rows = draft, distributions.as_categorical(target), bonus_tokens

    def trace_calls() -> None:
        nonlocal traced_draw
        traced_draw = _Enumerated([])
        _run(verifier.core, traced_draw, options, *rows)

    traced_draw = None
    jax.eval_shape(trace_calls)
    choices = [] if traced_draw.has_loop else traced_draw.unknown
    while True:
        outcomes, num_outcomes = _product(choices, batch_size)
        repeated = jax.tree.map(lambda x: np.repeat(np.asarray(x), num_outcomes, axis=0), rows)  # noqa: B023
        if traced_draw.has_loop:
            draw = _Enumerated(outcomes)
            with jax.disable_jit():
                verified, weight = _run(verifier.core, draw, options, *repeated), draw.weight
            unknown = draw.unknown
        else:
            (verified, weight), unknown = _replay(verifier.core, static, traced, outcomes, *repeated), []
        if not unknown:
            weight = jnp.broadcast_to(weight, (batch_size * num_outcomes,))
            return verified, np.asarray(weight).reshape(batch_size, num_outcomes)
        choices = choices + unknown


def _run(core, draw, options, draft, target, bonus_tokens):
    draft, target, bonus_tokens = jax.tree.map(jnp.asarray, (draft, target, bonus_tokens))
    bonus = {} if bonus_tokens is None else {"bonus_tokens": bonus_tokens}
    return core(draw, canonical(draft), target, **bonus, **options)


@partial(jax.jit, static_argnames=("core", "static"))
def _replay(core, static, traced, outcomes, *rows):
    draw = _Enumerated(outcomes)
    return _run(core, draw, dict(static) | traced, *rows), draw.weight


def _product(choices: list[np.ndarray], batch_size: int) -> tuple[list[np.ndarray], int]:
    """Every combination of the choices of all calls, for each row of the batch, and how many N there are.

    Returns:
        For each call its outcomes [B * N, ...]; and N.
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
    """Compute the exact joint distribution of the next K+1 tokens: those that one step emits, then the target's own.

    Args:
        verifier: with a `core` (made by `from_core`).
        target: conditional logits of the target, levels 0 to K: level i has shape [V] * i + [V].
        draft: conditional logits of the draft, levels 0 to K-1, or K token ids of deterministic drafts.
        num_tokens: drafts that the row has, at most K; None is K.
        dtype: of the logits given to the verifier.
        target_temperature: None is 1.
        draft_temperature: None is 1.
        min_logit: the cut of all rows of target and draft; None is none.
        **options: of the verifier.

    Returns:
        float64 array [V] * (K + 1). A lossless verifier gives `product_law(target)`.
    """
    num_draft_tokens, vocab_size = len(target) - 1, target[0].shape[-1]
    deterministic = len(draft) == 0 or np.ndim(draft[0]) == 0
    paths = [tuple(draft)] if deterministic else list(product(range(vocab_size), repeat=num_draft_tokens))
    batch_size = len(paths)

    def constant(value: float | int | None, kind: Any) -> Array | None:
        return None if value is None else jnp.full(batch_size, value, kind)

    def distribution(tables: Sequence[Table], temperature: float | None) -> Categorical:
        cut = None if min_logit is None else jnp.full((batch_size, len(tables)), min_logit, jnp.float32)
        return Categorical(jnp.asarray(rows_along(tables, paths), dtype), constant(temperature, jnp.float32), cut)

    drafted = Draft(
        jnp.asarray(np.array(paths, np.int32).reshape(batch_size, num_draft_tokens)),
        None if deterministic else distribution(draft, draft_temperature),
        constant(num_tokens, jnp.int32),
    )
    scored = distribution(target, target_temperature)
    verified, weight = enumerate_outcomes(verifier, drafted, scored, **options)
    target_probs = [probabilities(t, target_temperature, min_logit) for t in target]
    path_weight = np.ones(1)
    if not deterministic:
        path_weight = path_probabilities([probabilities(t, draft_temperature, min_logit) for t in draft], paths)
    return completed_law(verified.tokens, (path_weight[:, None] * weight).reshape(-1), target_probs)


def rows_along(tables: Sequence[Table], paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The rows [N, levels, V] of conditional tables that stand along N paths of tokens."""
    return np.stack([[table[path[:level]] for level, table in enumerate(tables)] for path in paths])


def path_probabilities(tables: Sequence[Table], paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The probability [N] of each of N paths of tokens, from conditional probabilities."""
    return np.array([np.prod([table[path[: i + 1]] for i, table in enumerate(tables)]) for path in paths])


def completed_law(tokens: Array, weight: np.ndarray, target: Sequence[Table]) -> np.ndarray:
    """The law [V] * (K + 1) of emitted tokens [N, K+1] of probability [N], each completed with the target's own."""
    law = np.zeros((target[0].shape[-1],) * len(target))
    is_possible = weight != 0
    tokens, weight = np.asarray(tokens)[is_possible], weight[is_possible]
    emitted, inverse = np.unique(tokens, axis=0, return_inverse=True)
    for row, mass in zip(emitted, np.bincount(inverse.reshape(-1), np.asarray(weight, np.float64)), strict=True):
        prefix = tuple(int(t) for t in row if t >= 0)
        law[prefix] += mass * product_law(target, prefix)
    return law


def probabilities(logits: Table, temperature: float | None = None, min_logit: float | None = None) -> np.ndarray:
    """Softmax of logits / temperature over the last axis in float64; temperature 0 is one-hot at the lowest argmax."""
    logits = np.asarray(logits, np.float64)
    if min_logit is not None:
        logits = np.where(logits >= min_logit, logits, -np.inf)
    if temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    logits = logits / (1.0 if temperature is None else temperature)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def row_probabilities(distribution: Categorical) -> np.ndarray:
    """The probabilities [B, T, V] of every row in float64; NaN in rows without any mass."""
    logits, temperature = np.asarray(distributions.kept_logits(distribution)), distribution.temperature
    values = np.ones(len(logits)) if temperature is None else np.asarray(temperature)
    with np.errstate(invalid="ignore"):
        return np.stack([probabilities(rows, value) for rows, value in zip(logits, values, strict=True)])


def product_law(tables: Sequence[Table], prefix: tuple[int, ...] = ()) -> np.ndarray:
    """The joint law of the tokens after `prefix` from conditional ones: an array [V] * (levels - len(prefix))."""
    law = np.ones(())
    for table in tables[len(prefix) :]:
        law = law[..., None] * table[prefix]
    return law


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the L1 distance of two laws."""
    return 0.5 * float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).sum())
