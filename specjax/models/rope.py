"""Rotary position embeddings (RoPE): the frequencies of a head, their scaling by checkpoints, and the rotation."""

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp

from specjax.types import Array


class RopeScaling(Protocol):
    """Function that changes the frequencies [D / 2] float32 of a head of D numbers; a frozen dataclass."""

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        ...

    def __call__(self, frequency: Array) -> Array: ...


@dataclass(frozen=True)
class LinearScaling:
    """Divide all frequencies by a factor, which has the effect of dividing the positions by it."""

    factor: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array) -> Array:
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divide the low frequencies by a factor, keep the high ones, and interpolate linearly between them.

    A frequency is low if it makes fewer than `low` turns in `original_length` positions, and high if it makes more than
    `high`.

    Raises:
        ValueError: `low` is not below `high`.
    """

    factor: float
    low: float
    high: float
    original_length: int

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low_freq_factor must be below high_freq_factor = {self.high}, got {self.low}")

    @property
    def magnitude(self) -> float:
        return 1.0

    def __call__(self, frequency: Array) -> Array:
        turns = self.original_length * frequency / (2 * math.pi)
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

    def __call__(self, frequency: Array) -> Array:
        size = 2 * frequency.shape[-1]

        def index_of(turns: float) -> float:
            return size * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high = high if high > low else low + 0.001
        divided = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequency * (1 - divided) + frequency / self.factor * divided


Rotation = tuple[Array, Array]  # cosines and sines [B, T, D / 2] float32 of each position's angles


def rotation(
    positions: Array, size: int, theta: float, scaling: RopeScaling | None = None, turned: int | None = None
) -> Rotation:
    """Return the cosines and sines for heads of `size` numbers at positions [B, T] int32.

    Args:
        positions: [B, T] int32.
        size: D, even.
        theta: base of the frequencies: pair i of D / 2 turns by theta ** (-2 i / D) per position.
        scaling: changes the frequencies; None keeps them.
        turned: so many numbers turn, in the first pairs, by the frequencies of a head of this size; None is all.
    """
    half = (size if turned is None else turned) // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling(frequency)
    frequency = jnp.pad(frequency, (0, size // 2 - half))
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def rotate(x: Array, rotation: Rotation | None) -> Array:
    """Rotate the pairs of numbers (i, i + D / 2) of each head of x [B, T, H, D] by their angles; None keeps x."""
    if rotation is None:
        return x
    cos, sin = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
