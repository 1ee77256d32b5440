"""Layers that attend to the keys and values of an earlier layer, as small Gemma 4 has them.

The earlier layer lends its memory with the keys and values of the call. A layer that borrows them writes the same
numbers to the same slots again, so every kind of memory and every kernel serves it as it is.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from pallas_kernels.attention import HeadNorms
from specjax.models.attention import KeyValues, normed
from specjax.types import Array


@partial(jax.tree_util.register_dataclass, data_fields=["memory"], meta_fields=[])
@dataclass(frozen=True)
class Lender:
    """The memory of a layer whose record is what later layers borrow."""

    memory: KeyValues

    def attend(
        self, query: Array, key: Array, value: Array, *options: Any, norms: HeadNorms | None = None
    ) -> tuple[Array, "Borrowed"]:
        """Attend as `KeyValues` says."""
        query, key = normed(query, key, norms)
        attended, kept = self.memory.attend(query, key, value, *options)
        return attended, Borrowed(_after(self.memory, kept), key, value)


@partial(jax.tree_util.register_dataclass, data_fields=["memory", "key", "value"], meta_fields=[])
@dataclass(frozen=True)
class Borrowed:
    """The memory of an earlier layer after the call, with the keys and values of the call."""

    memory: KeyValues
    key: Array  # [B, T, kv heads, D], after their norm, not yet rotated
    value: Array  # [B, T, kv heads, D]

    @property
    def kept(self) -> Any:
        """The earlier layer's cache after the call; None of whole sequences, which are not kept."""
        return getattr(self.memory, "cache", None)

    def attend(
        self, query: Array, key: None, value: None, *options: Any, norms: HeadNorms | None = None
    ) -> tuple[Array, "Borrowed"]:
        """Attend as `KeyValues` says, to the keys and values of the earlier layer."""
        query, _ = normed(query, key, norms)
        attended, kept = self.memory.attend(query, self.key, self.value, *options)
        return attended, replace(self, memory=_after(self.memory, kept))


def _after(memory: Any, kept: Any) -> Any:
    """Return a memory with the cache that a call left; whole sequences have none."""
    return memory if kept is None else replace(memory, cache=kept)
