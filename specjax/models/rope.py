"""Rotary position embeddings (RoPE): the frequencies of a head, their scaling by checkpoints, and the rotation."""

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp

from specjax.types import Array


class RopeScaling(Protocol):
    """Function that changes the frequencies [D / 2] float32 of a head of D numbers; a frozen dataclass."""

    def __call__(self, frequency: Array) -> Array: ...


@dataclass(frozen=True)
class LinearScaling:
    """Divide all frequencies by a factor, which has the effect of dividing the positions by it."""

    factor: float

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

    def __call__(self, frequency: Array) -> Array:
        turns = self.original_length * frequency / (2 * math.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


Rotation = tuple[Array, Array]  # cosines and sines [B, T, D / 2] float32 of each position's angles


def rotation(positions: Array, size: int, theta: float, scaling: RopeScaling | None = None) -> Rotation:
    """Return the cosines and sines for heads of `size` numbers at positions [B, T] int32.

    Args:
        positions: [B, T] int32.
        size: D, even.
        theta: base of the frequencies: pair i of D / 2 turns by theta ** (-2 i / D) per position.
        scaling: changes the frequencies; None keeps them.
    """
    half = size // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling(frequency)
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, rotation: Rotation | None) -> Array:
    """Rotate the pairs of numbers (i, i + D / 2) of each head of x [B, T, H, D] by their angles; None keeps x."""
    if rotation is None:
        return x
    cos, sin = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
