"""Chi-square tests of decoded tokens against the distribution that they should follow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.decoding.drafters import in_memory
from specjax.sampling import Sampling
from specjax.testing.toys import bigram_model
from specjax.types import Array, Verified


class ChiSquare(NamedTuple):
    """The result of a chi-square test."""

    statistic: float
    degrees: int  # degrees of freedom
    bound: float  # if the distribution is right, the statistic exceeds it less than once in 1e9 runs


def chi_square(counts: np.ndarray, probs: np.ndarray, min_expected: float = 5.0) -> ChiSquare:
    """Compare the counts of outcomes with their distribution.

    Args:
        counts: the count of each outcome, of any shape.
        probs: the probability of each outcome, of the same shape; the probabilities are normalised.
        min_expected: outcomes with a smaller expected count are merged into one, because the chi-square distribution
            approximates them badly.

    Returns:
        ChiSquare, whose statistic is infinite if an impossible outcome was counted.

    Raises:
        ValueError: the shapes differ.

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
    """Decode `num_samples` sequences from token 0 with `specjax.generate`.

    Args:
        verifier: the verifier, with its options bound.
        target: logits [V, V] of a bigram target.
        proposer: a proposer with the same vocabulary.
        num_samples: the number of sequences, which are the rows of one batch.
        num_tokens: the number of tokens to decode after token 0, over several steps.
        temperature: [num_samples] float32, the target's temperature in each row; None is 1.
        seed: the seed of the keys.

    Returns:
        Tokens [num_samples, num_tokens] int32.
    """
    in_memory(proposer)  # raises for other objects, which jit would not name
    state = _prefill(
        bigram_model(target),
        proposer,
        jnp.zeros((num_samples, 1), jnp.int32),
        jnp.ones(num_samples, jnp.int32),
        Sampling(max_tokens=jnp.full(num_samples, num_tokens, jnp.int32), temperature=temperature),
        jax.random.key(seed),
        max_length=num_tokens + 1,
    )
    return np.asarray(decode.generate(bigram_model(target), proposer, state, verifier=verifier).context.tokens)[:, 1:]


# One program: outside of `jax.jit` each operation is compiled alone for every number of samples.
_prefill = jax.jit(decode.prefill, static_argnames="max_length")


def assert_sampled_distribution(name: str, tokens: np.ndarray, target: np.ndarray) -> None:
    """Raise AssertionError unless decoded tokens follow the target, by chi-square tests.

    Each test compares the joint distribution of a window of neighbouring tokens, which has at most 1000 outcomes.

    Args:
        name: the name of the case, for the message.
        tokens: [N, T] decoded tokens after token 0.
        target: [V, V] probabilities of the bigram target.
    """
    vocab_size, num_tokens = target.shape[-1], tokens.shape[1]
    width = min(num_tokens, int(np.log(1000) / np.log(vocab_size)))
    marginal = np.eye(vocab_size)[0]  # the distribution of the token before the window
    for start in range(num_tokens - width + 1):
        joint = marginal @ target
        for _ in range(width - 1):
            joint = joint[..., None] * target
        window = tokens[:, start : start + width]
        index = np.ravel_multi_index(tuple(window.T), (vocab_size,) * width)
        counts = np.bincount(index, minlength=vocab_size**width).reshape(joint.shape)
        test = chi_square(counts, joint)
        if test.statistic > test.bound:
            raise AssertionError(
                f"not lossless on {name!r}: tokens {start} to {start + width - 1} of {len(tokens)} sequences give "
                f"chi-square {test.statistic:.0f} with {test.degrees} degrees of freedom, expected at most "
                f"{test.bound:.0f}; {describe_worst(counts / len(tokens), joint)}"
            )
        marginal = marginal @ target


def describe_worst(found: np.ndarray, exact: np.ndarray) -> str:
    """Say for which tokens a joint distribution differs most from the exact one."""
    tokens = np.unravel_index(np.argmax(np.abs(found - exact)), found.shape)
    return f"worst at tokens {[int(t) for t in tokens]}: probability {found[tokens]:.6f}, expected {exact[tokens]:.6f}"
