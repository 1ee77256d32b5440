"""Rotary position embeddings (RoPE): the frequencies of a head, their scaling by checkpoints, and the rotation."""

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp

from specjax.types import Array


class RopeScaling(Protocol):
    """Function that changes the frequencies [D / 2] float32 of a head of D numbers; a frozen dataclass.

    It takes the frequencies and, for kinds that depend on it, the static number of positions that a row has room for.
    """

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        ...

    def __call__(self, frequency: Array, length: int | None = None) -> Array: ...


@dataclass(frozen=True)
class LinearScaling:
    """Divide all frequencies by a factor, which has the effect of dividing the positions by it."""

    factor: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divide the low frequencies by a factor, keep the high ones, and interpolate linearly between them.

    A frequency is low if it makes fewer than `low` turns in `original_length` positions, and high if it makes more than
    `high`. Where both are the same, as in Llama 4 Scout, there are none between.

    Raises:
        ValueError: `low` is above `high`.
    """

    factor: float
    low: float
    high: float
    original_length: int

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low_freq_factor must be at most high_freq_factor = {self.high}, got {self.low}")

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        turns = self.original_length * frequency / (2 * math.pi)
        if self.low == self.high:
            return jnp.where(turns < self.low, frequency / self.factor, frequency)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Divide the low frequencies by a factor, keep the high ones, and interpolate between them by their index (YaRN).

    Pair i of D / 2 makes `original_length theta ** (-2 i / D) / (2 pi)` turns in the original length. Pairs with more
    than `beta_fast` turns keep their frequency, and pairs with fewer than `beta_slow` have it divided.

    Args:
        factor: the factor.
        original_length: number of positions of the training.
        theta: base of the frequencies.
        beta_fast: turns of the highest frequency that is changed.
        beta_slow: turns of the lowest frequency that is not wholly divided.
        truncate: whether the bounds are rounded to whole indices.
        magnitude: factor on cosines and sines.
    """

    factor: float
    original_length: int
    theta: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        size = 2 * frequency.shape[-1]

        def index_of(turns: float) -> float:
            return size * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high = high if high != low else low + 0.001
        divided = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequency * (1 - divided) + frequency / self.factor * divided


@dataclass(frozen=True)
class DynamicScaling:
    """Raise the base of the frequencies with the number of positions of a row, once it passes the trained length.

    Pair i of D / 2 has the frequency `(theta g) ** (-2 i / D)` with `g = (factor n / original_length - (factor - 1)) **
    (D / (D - 2))`, where n is the number of positions that a row has room for, or `original_length` where that is more.

    Args:
        factor: the factor.
        original_length: number of positions of the training.
        theta: base of the frequencies of short rows.
    """

    factor: float
    original_length: int
    theta: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        size = 2 * frequency.shape[-1]
        longer = max(length or 0, self.original_length) / self.original_length
        theta = self.theta * (self.factor * longer - (self.factor - 1)) ** (size / (size - 2))
        return frequencies(size, theta)


@dataclass(frozen=True)
class LongRopeScaling:
    """Divide each frequency by a number, from one list for short rows and from another list for long rows.

    A row is long if it has room for more positions than the training had, however many of them it has filled: so all
    keys of a row turn alike.

    Args:
        short: the D / 2 divisors of short rows.
        long: the D / 2 divisors of long rows.
        original_length: number of positions of the training.
        magnitude: factor on cosines and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    magnitude: float = 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        is_long = length is not None and length > self.original_length
        return frequency / jnp.asarray(self.long if is_long else self.short, jnp.float32)


@dataclass(frozen=True)
class ProportionalScaling:
    """Turn the first pairs of a whole head alone, by their frequencies divided by a factor.

    Args:
        num_pairs: number of pairs that turn.
        factor: the factor.
    """

    num_pairs: int
    factor: float = 1.0

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        return jnp.where(jnp.arange(frequency.shape[-1]) < self.num_pairs, frequency / self.factor, 0)


@dataclass(frozen=True)
class Backward:
    """Turn by negative angles, of the frequencies that another scaling gives, which does not depend on the length."""

    scaling: RopeScaling | None = None  # None keeps the frequencies

    @property
    def magnitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def __call__(self, frequency: Array, length: int | None = None) -> Array:
        return -(frequency if self.scaling is None else self.scaling(frequency, length))


@dataclass(frozen=True)
class Rope:
    """How the heads of a layer turn with the position."""

    theta: float = 10000.0  # base of the frequencies
    scaling: RopeScaling | None = None  # changes the frequencies; None keeps them
    size: int | None = None  # numbers of a head that turn, the first ones; None is all
    is_interleaved: bool = False  # whether two numbers that turn together stand side by side in a head


@dataclass(frozen=True)
class QueryScaling:
    """Multiply the query at position p by 1 + beta ln(1 + floor((p + offset) / length)).

    This sharpens attention in long rows.
    """

    beta: float
    length: int
    offset: int = 0

    def __call__(self, positions: Array) -> Array:
        """Return the factor [B, T] float32 of queries at positions [B, T] int32."""
        return 1 + self.beta * jnp.log1p(((positions + self.offset) // self.length).astype(jnp.float32))


NO_ROPE = Rope(size=0)  # of a layer that does not see positions
# Cosines and sines [B, T, R / 2] float32 of each position's angles; the first R numbers of a head turn.
Rotation = tuple[Array, Array]


def frequencies(size: int, theta: float) -> Array:
    """Return the frequencies [D / 2] float32 of a head of `size` numbers D: theta ** (-2 i / D)."""
    return theta ** (-jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))


def rotation(
    positions: Array,
    size: int,
    theta: float,
    scaling: RopeScaling | None = None,
    turned: int | None = None,
    length: int | None = None,
) -> Rotation | None:
    """Return the cosines and sines for heads of `size` numbers at positions [B, T] int32; None where none turns.

    Args:
        positions: [B, T] int32.
        size: D, even.
        theta: base of the frequencies: pair i of D / 2 turns by theta ** (-2 i / D) per position.
        scaling: changes the frequencies; None keeps them.
        turned: so many numbers turn, the first ones, by the frequencies of a head of this size; None is all.
        length: static number of positions that each row has room for, where the scaling depends on it.
    """
    if turned == 0:
        return None
    turned = size if turned is None else turned
    frequency = frequencies(turned, theta)
    if scaling is not None:
        frequency = scaling(frequency, length)
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def rotate(x: Array, rotation: Rotation | None) -> Array:
    """Rotate the pairs of numbers (i, i + R / 2) of each head of x [B, T, H, D] by their angles, i < R / 2.

    The numbers from R on neither turn nor grow. None keeps x.
    """
    if rotation is None:
        return x
    cos, sin = (part[:, :, None] for part in rotation)
    half = cos.shape[-1]
    first, second, kept = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(one.astype(x.dtype) for one in turned), kept], axis=-1)
