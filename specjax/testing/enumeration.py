"""The exact distribution of what a verifier emits, by enumeration of its chance.

A verifier made by `specjax.verifiers.from_core` takes all its chance from a `Draw`. Here the draw is replaced by one
that runs through every outcome with its probability, so the shipped code is what is checked, and an error of 1e-6
shows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.distributions import Residual
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers.core import canonical

Table = np.ndarray  # level i of a conditional table: [V] * i + [V], the law of token i + 1 given the first i


class _Record:
    """A draw that notes which outcomes each call can have."""

    def __init__(self):
        self.outcomes: list[np.ndarray] = []

    def flip(self, probabilities: Array) -> Array:
        self.outcomes.append(np.array(list(product((False, True), repeat=probabilities.shape[1]))))
        return jnp.zeros(probabilities.shape, bool)

    def pick(self, residual: Residual) -> Array:
        self.outcomes.append(np.arange(residual.target.distribution.logits.shape[-1], dtype=np.int32))
        return jnp.zeros(residual.target.shift.shape[:1], jnp.int32)

    def sample(self, target: Categorical) -> Array:
        batch_size, num_rows, vocab_size = distributions.shape_of(target)
        self.outcomes.append(np.array(list(product(range(vocab_size), repeat=num_rows)), np.int32))
        return jnp.zeros((batch_size, num_rows), jnp.int32)


class _Replay:
    """A draw whose every call gives the outcome that its row stands for; `weight` [B] is their probability."""

    def __init__(self, outcomes: list[np.ndarray]):
        self.outcomes = iter(outcomes)
        self.weight: Array | float = 1.0

    def flip(self, probabilities: Array) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        chance = jnp.clip(jnp.where(jnp.isnan(probabilities), 0, probabilities), 0, 1)
        self.weight = self.weight * jnp.prod(jnp.where(outcome, chance, 1 - chance), axis=1)
        return outcome

    def pick(self, residual: Residual) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        probs = distributions.residual_probs(residual)
        self.weight = self.weight * jnp.take_along_axis(probs, outcome[:, None], axis=1)[:, 0]
        return outcome

    def sample(self, target: Categorical) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        log_prob = distributions.token_log_prob(distributions.normalize(target), outcome)
        self.weight = self.weight * jnp.exp(jnp.sum(log_prob, axis=1))
        return outcome


def enumerate_outcomes(
    verifier: Callable[..., Verified], draft: Draft, target: Categorical | Array, **options: Any
) -> tuple[Verified, np.ndarray]:
    """Run a verifier on every outcome of its chance.

    Args:
        verifier: with a `core` (made by `from_core`).
        draft: of B rows.
        target: of B rows.
        **options: of the verifier.

    Returns:
        Verified with a leading axis of B * N outcomes, those of one row together, and the probability [B, N] of each.
    """
    target = distributions.as_categorical(target)
    static = tuple((k, v) for k, v in options.items() if v is None or isinstance(v, bool | str))
    traced = {k: v for k, v in options.items() if (k, v) not in static}
    record = _Record()
    jax.eval_shape(lambda: verifier.core(record, canonical(draft), target, **options))
    sizes = [len(outcome) for outcome in record.outcomes]
    index = np.indices(sizes).reshape(len(sizes), -1)
    num_outcomes = index.shape[1]
    batch_size = draft.tokens.shape[0]
    outcomes = [
        np.tile(outcome[i], (batch_size,) + (1,) * (outcome.ndim - 1))
        for outcome, i in zip(record.outcomes, index, strict=True)
    ]
    draft, target = jax.tree.map(lambda x: jnp.repeat(x, num_outcomes, axis=0), (draft, target))
    verified, weight = _replay(verifier.core, static, traced, outcomes, draft, target)
    return verified, np.asarray(weight).reshape(batch_size, num_outcomes)


@partial(jax.jit, static_argnames=("core", "static"))
def _replay(core, static, traced, outcomes, draft, target):
    replay = _Replay(outcomes)
    verified = core(replay, canonical(draft), target, **dict(static), **traced)
    return verified, jnp.broadcast_to(replay.weight, draft.tokens.shape[:1])


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
    """Compute the exact law of the next K+1 tokens: those that one step emits, then the target's own.

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

    def rows(tables: Sequence[Table]) -> Array:
        return jnp.asarray(np.stack([[t[p[:i]] for i, t in enumerate(tables)] for p in paths]), dtype)

    def constant(value: float | int | None, kind: Any) -> Array | None:
        return None if value is None else jnp.full(batch_size, value, kind)

    def distribution(tables: Sequence[Table], temperature: float | None) -> Categorical:
        cut = None if min_logit is None else jnp.full((batch_size, len(tables)), min_logit, jnp.float32)
        return Categorical(rows(tables), constant(temperature, jnp.float32), cut)

    drafted = Draft(
        jnp.asarray(np.array(paths, np.int32).reshape(batch_size, num_draft_tokens)),
        None if deterministic else distribution(draft, draft_temperature),
        constant(num_tokens, jnp.int32),
    )
    scored = distribution(target, target_temperature)
    verified, weight = enumerate_outcomes(verifier, drafted, scored, **options)
    target_law = [probabilities(t, target_temperature, min_logit) for t in target]
    if deterministic:
        path_weight = np.ones(1)
    else:
        draft_law = [probabilities(t, draft_temperature, min_logit) for t in draft]
        path_weight = np.array([np.prod([t[p[: i + 1]] for i, t in enumerate(draft_law)]) for p in paths])

    return completed_law(verified.tokens, (path_weight[:, None] * weight).reshape(-1), target_law)


def completed_law(tokens: Array, weight: np.ndarray, target: Sequence[Table]) -> np.ndarray:
    """The law [V] * (K + 1) of emitted tokens [N, K+1] of probability [N], each completed with the target's own."""
    law = np.zeros((target[0].shape[-1],) * len(target))
    emitted, inverse = np.unique(np.asarray(tokens), axis=0, return_inverse=True)
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


def product_law(tables: Sequence[Table], prefix: tuple[int, ...] = ()) -> np.ndarray:
    """The joint law of the tokens after `prefix` from conditional ones: an array [V] * (levels - len(prefix))."""
    law = np.ones(())
    for table in tables[len(prefix) :]:
        law = law[..., None] * table[prefix]
    return law


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the L1 distance of two laws."""
    return 0.5 * float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).sum())
