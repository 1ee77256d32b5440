"""Decoded tokens against the distribution they should follow, by chi-square over several steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.sampling import Sampling
from specjax.testing.toys import bigram_model
from specjax.types import Array, Verified


class ChiSquare(NamedTuple):
    """A chi-square test: `statistic` exceeds `bound` less than once in 1e9 runs when the law is right."""

    statistic: float
    degrees: int
    bound: float


def chi_square(counts: np.ndarray, probs: np.ndarray, min_expected: float = 5.0) -> ChiSquare:
    """Compare counts with a law, the cells that expect fewer than `min_expected` merged into one.

    Args:
        counts: of each outcome, any shape.
        probs: the law, the same shape.
        min_expected: below it the chi-square law is a bad approximation of a cell.

    Returns:
        ChiSquare; infinite where an impossible outcome was counted.

    Example:
        >>> chi_square(np.array([500, 500]), np.array([0.5, 0.5])).statistic
        0.0
    """
    counts, probs = np.ravel(np.asarray(counts, np.float64)), np.ravel(np.asarray(probs, np.float64))
    if counts.shape != probs.shape:
        raise ValueError(f"counts and probs must have the same shape, got {counts.shape} and {probs.shape}")
    expected = counts.sum() * probs / probs.sum()
    small = expected < min_expected
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(expected > 0, (counts - expected) ** 2 / expected, np.where(counts > 0, np.inf, 0.0))
    degrees = max(len(counts) - 1, 1)
    return ChiSquare(float(terms.sum()), degrees, degrees + 9.1 * degrees**0.5 + 41.4)


def sampled_tokens(
    verifier: Callable[..., Verified],
    target: Array,
    proposer: Any,
    *,
    num_samples: int,
    num_tokens: int = 6,
    temperature: Array | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Decode `num_samples` sequences from token 0 through the public loop.

    Args:
        verifier: with its options bound.
        target: logits [V, V] of a bigram target.
        proposer: of the same vocabulary.
        num_samples: rows of the batch.
        num_tokens: decoded after token 0, over several steps.
        temperature: [num_samples] of the target; None is 1.
        seed: of the keys.

    Returns:
        Tokens [num_samples, num_tokens].
    """
    state = decode.prefill(
        bigram_model(target),
        proposer,
        jnp.zeros((num_samples, 1), jnp.int32),
        jnp.ones(num_samples, jnp.int32),
        Sampling(max_tokens=jnp.full(num_samples, num_tokens, jnp.int32), temperature=temperature),
        jax.random.key(seed),
        max_length=num_tokens + 1,
    )
    return np.asarray(decode.generate(bigram_model(target), proposer, state, verifier=verifier).context.tokens)[:, 1:]


def assert_sampled_distribution(name: str, tokens: np.ndarray, target: np.ndarray) -> None:
    """Compare the joint law of tokens [N, T] in windows of as many as make at most 1000 outcomes."""
    vocab_size, num_tokens = target.shape[-1], tokens.shape[1]
    width = min(num_tokens, int(np.log(1000) / np.log(vocab_size)))
    marginal = np.eye(vocab_size)[0]  # of the token before the window
    for start in range(num_tokens - width + 1):
        law = marginal @ target
        for _ in range(width - 1):
            law = law[..., None] * target
        window = tokens[:, start : start + width]
        index = np.ravel_multi_index(tuple(window.T), (vocab_size,) * width)
        counts = np.bincount(index, minlength=vocab_size**width).reshape(law.shape)
        test = chi_square(counts, law)
        if test.statistic > test.bound:
            raise AssertionError(
                f"not lossless on {name!r}: tokens {start} to {start + width - 1} of {len(tokens)} sequences give "
                f"chi-square {test.statistic:.0f} with {test.degrees} degrees of freedom, expected at most "
                f"{test.bound:.0f}; {describe_worst(counts / len(tokens), law)}"
            )
        marginal = marginal @ target


def describe_worst(law: np.ndarray, exact: np.ndarray) -> str:
    tokens = np.unravel_index(np.argmax(np.abs(law - exact)), law.shape)
    return f"worst at tokens {[int(t) for t in tokens]}: probability {law[tokens]:.6f}, expected {exact[tokens]:.6f}"
