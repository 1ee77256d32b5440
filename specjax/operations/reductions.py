"""Reductions of whole rows of logits: masses, largest logits and argmax. A logit of NaN counts as -inf."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.rows import BLOCK_SIZE
from specjax.types import Array, Categorical


def numbers(logits: Array) -> Array:
    """Return logits with -inf in place of NaN."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def widen(array: Array, dtype: jnp.dtype | None = None) -> Array:
    """Return the array in float64 if `dtype` is float64, else in float32. None is the dtype of the array."""
    return array.astype(jnp.float64 if (dtype or array.dtype) == jnp.float64 else jnp.float32)


def in_memory_order(distribution: Categorical) -> Categorical:
    """Unpack the distribution without a gather: [R, 1, V], with one temperature per row.

    A function that reads all rows then need not gather them.
    """
    if distribution.rows is None:
        return distribution
    temperature, rows = distribution.temperature, distribution.rows
    if temperature is not None:
        num_rows = distribution.logits.shape[0]
        spread = jnp.broadcast_to(temperature[:, None], rows.shape)
        temperature = jnp.ones(num_rows, temperature.dtype).at[rows].set(spread, mode="drop")
    min_logit = distribution.min_logit if distribution.min_logit is None else distribution.min_logit[:, None]
    return Categorical(distribution.logits[:, None], temperature, min_logit)


def _kept_exponents(stored: Categorical, shift: Array) -> Array:
    """Return (logits - shift) / temperature, with -inf below the cut.

    The cut is made by arithmetic because XLA on CPUs writes the result of a select to memory. It has no gradient: the
    token that lies on the cut would get half the largest float from the arithmetic.
    """
    logits = widen(stored.logits)
    exponents = tempered(stored, logits - shift)
    if stored.min_logit is None:
        return exponents
    limits = jnp.finfo(logits.dtype)
    cut = jnp.maximum(stored.min_logit.astype(logits.dtype), limits.min)[..., None]
    return exponents + jax.lax.stop_gradient(jnp.minimum(logits - cut, 0) * limits.max)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def row_masses(stored: Categorical, block_size: int | None, has_best: bool) -> tuple[Array, Array, Array | None]:
    """Return masses, largest logits and, where `has_best`, argmax of rows, with NaN as -inf.

    XLA on GPUs replaces NaN while it reads the logits, at no cost. On CPUs the select would take as long as the masses.
    A NaN shows in the mass there, whatever a maximum makes of it, and rows without NaN are not read once more for it.

    Args:
        stored: the rows.
        block_size: tokens of a block of the vocabulary; None is all, which gives masses without an axis of blocks.
        has_best: whether the argmax is wanted.
    """

    def replace_first(stored: Categorical) -> tuple[Array, Array, Array | None]:
        return _of_numbers(stored._replace(logits=numbers(stored.logits)), block_size, has_best)

    def of_sequence(own: Categorical) -> tuple[Array, Array, Array | None]:
        return jax.tree.map(lambda x: x[0], replace_first(jax.tree.map(lambda x: x[None], own)))

    def replace_where_found(stored: Categorical) -> tuple[Array, Array, Array | None]:
        found = _of_numbers(stored, block_size, has_best)
        return jax.lax.cond(
            jnp.any(jnp.isnan(found[0])),
            lambda: jax.lax.map(of_sequence, stored),  # one at a time: nothing of the size of all logits is written
            lambda: found,
        )

    return jax.lax.platform_dependent(stored, cuda=replace_first, default=replace_where_found)


@row_masses.defjvp
def _row_masses_jvp(block_size: int | None, has_best: bool, primals: tuple, tangents: tuple) -> tuple:
    (stored,) = primals  # the derivative of a branch would keep arrays of the size of the logits for the other one
    stored = stored._replace(logits=numbers(stored.logits))
    return jax.jvp(lambda stored: _of_numbers(stored, block_size, has_best), (stored,), tangents)


def _of_numbers(stored: Categorical, block_size: int | None, has_best: bool) -> tuple[Array, Array, Array | None]:
    """Return the result of `row_masses` for rows without NaN, with the masses relative to the finite `top`, or to 0."""
    # The cut never removes the maximum. Without it XLA reduces the logits as they lie in memory.
    best = first_of_largest(stored.logits) if has_best else None
    top = jax.lax.stop_gradient(jnp.max(widen(stored.logits), axis=-1))
    shift = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(_kept_exponents(stored, shift[..., None]))
    return jnp.sum(weights, axis=-1) if block_size is None else block_sums(weights, block_size), top, best


def first_of_largest(logits: Array) -> Array:
    """Return the lowest id of the largest logit of every row [..., V].

    The block with the maximum is found first, because XLA's argmax over whole rows is slow on CPUs.
    """
    vocab_size = logits.shape[-1]
    block_size = min(BLOCK_SIZE, vocab_size)
    unpadded = [(0, 0)] * (logits.ndim - 1)
    padded = jnp.pad(widen(logits), [*unpadded, (0, -vocab_size % block_size)], constant_values=-jnp.inf)
    block_tops = jnp.max(padded.reshape(*logits.shape[:-1], padded.shape[-1] // block_size, block_size), axis=-1)
    block = jnp.argmax(block_tops, axis=-1, keepdims=True).astype(jnp.int32)
    inside = jnp.arange(block_size, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (-1,))
    ids = jnp.minimum(block * block_size + inside, vocab_size - 1)
    best = jnp.argmax(jnp.take_along_axis(logits, ids, axis=-1), axis=-1).astype(jnp.int32)
    return jnp.minimum(block[..., 0] * block_size + best, vocab_size - 1)


def block_sums(weights: Array, block_size: int) -> Array:
    """Return the sums [..., ceil(V / block_size)] over blocks of weights [..., V]."""
    unpadded = [(0, 0)] * (weights.ndim - 1)
    padded = jnp.pad(weights, [*unpadded, (0, -weights.shape[-1] % block_size)])
    return jnp.sum(padded.reshape(*weights.shape[:-1], padded.shape[-1] // block_size, block_size), axis=-1)


def tempered(distribution: Categorical, logits: Array) -> Array:
    """Divide logits by the temperature, except in rows of temperature 0, which callers handle themselves."""
    if distribution.temperature is None:
        return logits
    temperature = distribution.temperature[:, None, None]
    return _divide(logits, jnp.where(temperature > 0, temperature, 1).astype(logits.dtype))


@jax.custom_jvp
def _divide(logits: Array, temperature: Array) -> Array:
    """Return logits / temperature. Logits of -inf add 0 to the temperature's gradient, not the NaN of the quotient."""
    return logits / temperature


@_divide.defjvp
def _divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (logits, temperature), (logits_tangent, temperature_tangent) = primals, tangents
    finite = jnp.where(jnp.isfinite(logits), logits, 0)
    quotient = logits / temperature
    return quotient, (logits_tangent - finite / temperature * temperature_tangent) / temperature
