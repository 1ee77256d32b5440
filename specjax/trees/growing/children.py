"""The children of a node: the likeliest tokens of its row, the tokens that the target's noise prefers, or drawn tokens.

All work of the size of the vocabulary is one pass over each row. After it, blocks of the vocabulary are looked at.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rows import BLOCK_SIZE
from specjax import distributions
from specjax.keys import gumbel, numbered
from specjax.operations.reductions import in_memory_order, numbers, row_masses, tempered
from specjax.trees.growing.largest import counting, largest
from specjax.types import Array, Categorical


class Children(NamedTuple):
    """Distinct tokens for the children of each node, the best first."""

    tokens: Array  # [B, T, M] int32, -1 where a row has fewer
    log_probs: Array  # [B, T, M] float32, -inf where a row has fewer


def top(distribution: Categorical, width: int) -> Children:
    """Return the likeliest tokens of each row, the lower id where two are equally likely, with their log-probabilities.

    A temperature of 0 gives the log-probabilities of temperature 1.

    Args:
        distribution: of T nodes in each of B rows.
        width: M, number of children.
    """
    logits = numbers(distributions.kept_logits(distribution))
    ids = largest(logits, width)
    log_probs = tempered(distribution, jnp.take_along_axis(logits, ids, axis=-1)) - _log_mass(distribution)
    return _existing(ids, log_probs)


def coupled(keys: Array, distribution: Categorical, width: int) -> Children:
    """Return the tokens that the target is likeliest to draw with known noise, given a guess of its distribution.

    The first token is the one that the target draws (`distributions.sample`) where its distribution is the guess. The
    others follow by how little is missing. Such children are accepted more often than others by `trees.match`, and
    may be used with it alone. At temperature 0 they are the likeliest tokens.

    Args:
        keys: typed keys [B, T], the TARGET keys of the position after each node.
        distribution: the guess of the target's distribution after each node.
        width: M, number of children.

    Returns:
        The tokens, with the logarithms of weights that sum to 1, and are lower the more is missing.
    """
    masses, _, num_blocks = _block_masses(distribution)
    noise = gumbel(keys, (_block_size(distribution) + num_blocks,)).astype(masses.dtype)
    block_noise, inner_noise = noise[..., -num_blocks:], noise[..., : _block_size(distribution)]
    scores = jnp.where(masses > 0, jnp.log(masses) + block_noise, -jnp.inf)
    blocks = largest(scores, min(width, num_blocks))
    ids, logits = _blocks(distribution, blocks)
    inside = logits + inner_noise[..., None, :]
    gap = inside - jnp.max(jnp.where(inside > -jnp.inf, inside, -1e30), axis=-1, keepdims=True)
    total = jnp.take_along_axis(scores, blocks, axis=-1)[..., None] + gap
    total = jnp.where(logits > -jnp.inf, total, -jnp.inf).reshape(*total.shape[:-2], -1)
    place = largest(total, width)
    tokens = jnp.take_along_axis(ids.reshape(total.shape), place, axis=-1)
    weights = jax.nn.log_softmax(jnp.take_along_axis(total, place, axis=-1), axis=-1)
    return _or_top(distribution, _existing(tokens, weights), width)


def sampled(keys: Array, distribution: Categorical, width: int) -> Children:
    """Draw the children of each node without replacement, in the order of the draws.

    The first child is the token that `distributions.sample` draws with the same keys. A row with fewer tokens of
    positive probability has fewer children. At temperature 0 they are the likeliest tokens.

    Args:
        keys: typed keys [B, T], the DRAFT keys of each node.
        distribution: of T nodes in each of B rows.
        width: M, number of children.
    """
    masses, shift, num_blocks = _block_masses(distribution)
    block_size, tokens = _block_size(distribution), []
    for number in range(width):
        noise = gumbel(numbered(keys, number), (block_size + num_blocks,)).astype(masses.dtype)
        scores = jnp.where(masses > 0, jnp.log(masses) + noise[..., block_size:], -jnp.inf)
        block = jnp.argmax(scores, axis=-1).astype(jnp.int32)[..., None]
        ids, logits = (x[..., 0, :] for x in _blocks(distribution, block))
        for token in tokens:
            logits = jnp.where(ids == token[..., None], -jnp.inf, logits)
        place = jnp.argmax(logits + noise[..., :block_size], axis=-1)[..., None]
        token = jnp.take_along_axis(ids, place, axis=-1)[..., 0]
        token = jnp.where(jnp.max(scores, axis=-1) > -jnp.inf, token, -1)
        tokens.append(token)
        left = jnp.where(ids == token[..., None], -jnp.inf, logits)
        rest = jnp.sum(jnp.exp(left - tempered(distribution, shift)), axis=-1, keepdims=True)
        here = counting(num_blocks, 3) == block
        masses = jnp.where(here, rest, masses)
    drawn = jnp.stack(tokens, axis=-1)
    logits = tempered(distribution, distributions.kept_logits(distribution, jnp.maximum(drawn, 0)))
    log_probs = jnp.where(drawn >= 0, logits - _log_mass(distribution), -jnp.inf)
    return _or_top(distribution, Children(drawn, log_probs.astype(jnp.float32)), width)


def _block_size(distribution: Categorical) -> int:
    return min(BLOCK_SIZE, distribution.logits.shape[-1])


def _block_masses(distribution: Categorical) -> tuple[Array, Array, int]:
    """Return the masses [B, T, blocks] of blocks, relative to the shift [B, T, 1], and the number of blocks."""
    stored = in_memory_order(distribution)
    masses, highest, _ = row_masses(stored, _block_size(distribution), False)
    shift = jnp.where(jnp.isfinite(highest), highest, 0)
    if distribution.rows is not None:
        masses, shift = masses[distribution.rows, 0], shift[distribution.rows, 0]
    return masses, shift[..., None], masses.shape[-1]


def _log_mass(distribution: Categorical) -> Array:
    """Return the logarithm [B, T, 1] of the sum of exp(logit / temperature)."""
    masses, shift, _ = _block_masses(distribution)
    mass = jnp.sum(masses, axis=-1, keepdims=True)
    return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1)), 0) + tempered(distribution, shift)


def _blocks(distribution: Categorical, blocks: Array) -> tuple[Array, Array]:
    """Return the ids and logits / temperature [B, T, n, block] of n blocks [B, T, n]; -inf past the vocabulary."""
    block_size, vocab_size = _block_size(distribution), distribution.logits.shape[-1]
    ids = blocks[..., None] * block_size + counting(block_size, 4)
    flat = jnp.minimum(ids, vocab_size - 1).reshape(*blocks.shape[:-1], -1)
    logits = tempered(distribution, distributions.kept_logits(distribution, flat)).reshape(ids.shape)
    return ids, jnp.where(ids < vocab_size, logits, -jnp.inf)


def _existing(tokens: Array, log_probs: Array) -> Children:
    """Return children with the token -1 where the probability is 0."""
    is_there = log_probs > -jnp.inf
    tokens = jnp.where(is_there, tokens, -1).astype(jnp.int32)
    return Children(tokens, jnp.where(is_there, log_probs, -jnp.inf).astype(jnp.float32))


def _or_top(distribution: Categorical, children: Children, width: int) -> Children:
    """Return the children, and the likeliest tokens in rows of temperature 0."""
    if distribution.temperature is None:
        return children
    is_greedy = (distribution.temperature == 0)[:, None, None]
    return jax.tree.map(lambda first, second: jnp.where(is_greedy, first, second), top(distribution, width), children)
