"""Rotary positions: the frequencies of the pairs of a head, how checkpoints scale them, and the rotation."""

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp

from specjax.types import Array


class RopeScaling(Protocol):
    """Changes the frequencies [D / 2] of the pairs; a frozen dataclass."""

    def __call__(self, frequency: Array) -> Array: ...


@dataclass(frozen=True)
class LinearScaling:
    """Positions count as if divided by a factor."""

    factor: float

    def __call__(self, frequency: Array) -> Array:
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divides the low frequencies by a factor and keeps the high ones.

    Low and high are those that turn less than `low` and more than `high` times in `original_length` positions; between
    them, the result goes linearly from one to the other.
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


Rotation = tuple[Array, Array]  # cosine and sine [B, T, D / 2] of the angles of positions, float32


def rotation(positions: Array, size: int, theta: float, scaling: RopeScaling | None = None) -> Rotation:
    """That of heads of so many numbers at positions [B, T]."""
    half = size // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling(frequency)
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, rotation: Rotation) -> Array:
    """Turn the halves of each head of x [B, T, H, D] (RoPE)."""
    cos, sin = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
