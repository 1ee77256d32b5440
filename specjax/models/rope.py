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


def rotate(x: Array, positions: Array, theta: float, scaling: RopeScaling | None = None) -> Array:
    """Turn the halves of each head of x [B, T, H, D] by the angles of its positions [B, T] (RoPE)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling(frequency)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]  # [B, T, 1, D / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
