"""Toys for tests of caches in pages: tables in random order, pools full of NaN, and a target that reads its cache."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pages import read_slots, write_slots
from specjax.types import Model, ModelOutput


def random_table(shape: tuple[int, int], num_pages: int, seed: int = 0) -> np.ndarray:
    """A table of different pages of a pool, in random order."""
    size = shape[0] * shape[1]
    return np.random.default_rng(seed).permutation(num_pages)[:size].reshape(shape).astype(np.int32)


def poisoned(cache, is_poisoned=None):
    """The floats of a pool as NaN; with a mask [num_pages] or [num_pages, page_size], only those that it names."""

    def poison(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if is_poisoned is None:
            return jnp.full_like(leaf, jnp.nan)
        mask = jnp.asarray(is_poisoned)
        return jnp.where(mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim)), jnp.nan, leaf)

    return jax.tree.map(poison, cache)


def trigram_model(logits: jax.Array) -> Model:
    """A target whose last two tokens (u, v) decide the next, by row (u, v) of logits [V, V, V].

    It reads both from its cache. The token before the first is 0.
    """
    return Model(logits, _apply, _cache, vocab_size=logits.shape[-1], takes_pages=True)


def _apply(params, inputs, cache):
    slots = inputs.positions[:, :1] + jnp.arange(inputs.tokens.shape[1])[None]
    cache = write_slots(cache, slots, inputs.tokens, inputs.pages)
    held = jnp.pad(read_slots(cache, inputs.pages), ((0, 0), (1, 0)))
    before, last = (jnp.take_along_axis(held, slots + i, axis=1, mode="clip") for i in range(2))
    return ModelOutput(params[before, last]), cache


def _cache(num_pages, page_size):
    return jnp.zeros((num_pages, page_size), jnp.int32)
