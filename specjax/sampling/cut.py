"""Top-k, top-p and min-p as a cut on the logits: the smallest logit that a row keeps, found without a sort.

One read gives the maximum of every block of neighbouring tokens. The blocks with the largest maxima are gathered; they
hold every logit above the smallest of those maxima, so a cut found in them that lies above it is the cut of the row.
Rows where it does not lie above, as with a very flat distribution, are searched whole, a few at a time.

The search tries several thresholds a read, evenly spaced between two logits of the row. It counts the logits above each
threshold, or sums their mass, and goes on between the two logits next to the answer until these meet.

`pallas_kernels/cut.py` does the same in kernels.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.cut import Limits, find_cut, unsupported
from specjax.operations.dispatch import SMALL_VOCAB, check_implementation, dispatch
from specjax.parallel import shards

_BLOCK = 64  # tokens
_CANDIDATES = 128  # blocks of a row that are searched first
_THRESHOLDS = 8  # tried per read


def min_logit(
    logits: Array,
    *,
    temperature: Array | None = None,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> Array:
    """Find the smallest logit that min-p, then top-k, then top-p keep of softmax(logits / temperature).

    A token is kept iff `logits >= min_logit`, compared in the dtype of the result. The best token is always kept, and
    so are all ties of the last one that is kept. min-p keeps the tokens that are at least `min_p` times as probable as
    the best token; top-k keeps the `top_k` best of these; top-p keeps the fewest of those, best first, that hold
    `top_p` of their mass. NaN counts as -inf, which no token has.

    Masses are rounded to float32: the result is the exact cut for a `top_p` and a `min_p` that differ from the given
    ones by at most 1e-6, relative (1e-13 in float64). The cut moves only where a cumulated mass falls that close.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64.
        temperature: broadcastable to [...], None is 1. Rows of temperature 0 are greedy and not cut.
        top_k: broadcastable to [...], integer; off where <= 0 or >= V. None leaves it out of the program.
        top_p: broadcastable to [...]; off where >= 1, None as for top_k.
        min_p: broadcastable to [...]; off where <= 0, None as for top_k.
        axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static: each gives its own part
            [..., V / n] of the logits. None is a whole vocabulary.
        implementation: "xla"; "pallas" for the kernels, "interpret" for these without a GPU; None for the faster one on
            the platform.

    Returns:
        [...] float32, or float64 for logits of float64. It is -inf where no limit is on, where only top-k is on and the
        row has fewer tokens, and for a row without tokens.

    Raises:
        NotImplementedError: for a named implementation that does not support the case.
        ValueError: for a wrong shape or dtype.

    Example:
        >>> min_logit(jnp.array([3.0, 1.0, 2.0, 2.0]), top_k=jnp.array(2))
        Array(2., dtype=float32)
    """
    check_implementation(implementation)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be of floating dtype, got {logits.dtype}")
    shape, dtype = logits.shape[:-1], _wide(logits)
    if logits.size == 0 or (top_k is None and top_p is None and min_p is None):
        return jnp.full_like(logits, -jnp.inf, dtype, shape)
    rows = logits.reshape(-1, logits.shape[-1])
    vocab_size = logits.shape[-1] * shards.num_shards(axis_name)
    limits = _limits(Limits(temperature, top_k, top_p, min_p), shape, vocab_size, dtype)
    # Each device searches some rows whole: no search waits for another device, and the host waits for none of them.
    cut = dispatch(
        (shards.whole_rows(rows, axis_name), shards.own_rows(limits, axis_name)),
        xla=_find_cut,
        pallas=find_cut,
        reason=lambda logits, limits: unsupported(logits),
        is_worthwhile=lambda logits, limits: logits.shape[-1] >= SMALL_VOCAB,
        implementation=implementation,
    )
    return shards.all_rows(cut, rows.shape[0], axis_name).reshape(shape)


def _limits(given: Limits, shape: tuple[int, ...], vocab_size: int, dtype: jnp.dtype) -> Limits:
    """Check the limits of each row, and give them in the form [R] that the search takes: off in greedy rows."""

    def by_row(name: str, kind: type = jnp.number) -> Array:
        values = jnp.asarray(getattr(given, name))
        if not jnp.issubdtype(values.dtype, kind):
            raise ValueError(f"{name} must be of {kind.__name__} dtype, got {values.dtype}")
        sizes = zip(reversed(values.shape), reversed(shape), strict=False)
        if values.ndim > len(shape) or any(size not in (rows, 1) for size, rows in sizes):
            raise ValueError(f"{name} must be broadcastable to {shape}, got shape {values.shape}")
        return jnp.broadcast_to(values, shape).reshape(-1)

    temperature, top_k, top_p, min_p = given
    is_sampled = True
    if temperature is not None:
        temperature = by_row("temperature").astype(dtype)
        is_sampled = temperature > 0
    if top_k is not None:
        top_k = by_row("top_k", jnp.integer)
        top_k = jnp.where(is_sampled & (top_k < vocab_size), jnp.maximum(top_k, 0), 0).astype(jnp.int32)
    if top_p is not None:
        top_p = jnp.where(is_sampled, by_row("top_p").astype(dtype), 1)
    if min_p is not None:
        min_p = jnp.where(is_sampled, by_row("min_p").astype(dtype), 0)
    return Limits(temperature, top_k, top_p, min_p)


def _wide(logits: Array) -> jnp.dtype:
    """Return the dtype of the cut: float64 for logits of float64, else float32."""
    return jnp.float64 if logits.dtype == jnp.float64 else jnp.float32


def _find_cut(logits: Array, limits: Limits) -> Array:
    """Find the cut [R] of logits [R, V] by XLA; they are not read where no row has a limit."""
    dtype = _wide(logits)
    uncut = jnp.full_like(logits[:, 0], -jnp.inf, dtype)
    return lax.cond(limits.is_asked.any(), lambda: _cut(logits, limits, dtype), lambda: uncut)


def _cut(logits: Array, limits: Limits, dtype: jnp.dtype) -> Array:
    """Find the cut [R] of logits [R, V], first in the best blocks of each row."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)

    def in_blocks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, num_blocks * _BLOCK - vocab_size)), constant_values=-jnp.inf)
        return padded.reshape(x.shape[0], num_blocks, _BLOCK)

    if num_blocks <= _CANDIDATES:
        return _search(in_blocks(logits).astype(dtype), limits)[0]

    best, blocks = lax.top_k(in_blocks(logits).max(-1).astype(dtype), _CANDIDATES)
    outside = best.min(-1)  # no logit outside these blocks is larger
    tokens = blocks[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None]
    candidates = logits.at[jnp.arange(num_rows)[:, None, None], tokens].get(mode="fill", fill_value=-jnp.inf)
    total = None
    if limits.top_p is not None:
        highest = best.max(-1, keepdims=True)

        def mass() -> Array:
            return jnp.exp(_scaled(logits.astype(dtype), highest, limits.temperature)).sum(-1)

        is_needed = jnp.any((limits.top_p < 1) & ~limits.is_restricted)
        total = lax.cond(is_needed, mass, lambda: jnp.zeros_like(outside))
    cut, decisive = _search(candidates.astype(dtype), limits, total)

    # The maximum of NaN and numbers is not the same on every device.
    clean = ~jnp.isnan(logits).any(-1)
    settled = ~limits.is_asked | (clean & ((decisive > outside) | (outside == -jnp.inf)))
    unsettled_first = jnp.argsort(settled)
    # A symbolic number of rows cannot be compared with a number.
    chunk = min(num_rows, max(4, num_rows // 16)) if isinstance(num_rows, int) else 4

    def search_whole(i: Array, cut: Array) -> Array:
        rows = unsettled_first.at[i * chunk + jnp.arange(chunk, dtype=jnp.int32)].get(mode="clip")
        # Without the barrier XLA may convert all bfloat16 logits to float32 before the loop.
        whole = lax.optimization_barrier((logits, rows))[0][rows]
        of_rows = jax.tree.map(lambda limit: limit[rows], limits)
        found, _ = _search(in_blocks(whole).astype(dtype), of_rows)
        return cut.at[rows].set(found)

    return lax.fori_loop(0, -(-jnp.sum(~settled, dtype=jnp.int32) // chunk), search_whole, cut)


def _search(x: Array, limits: Limits, total: Array | None = None) -> tuple[Array, Array]:
    """Find the cut of x [N, C, _BLOCK], which may be a part of each row.

    Args:
        x: logits in any order.
        limits: of the N rows.
        total: [N] mass of the whole row, for rows without min-p and top-k; None where x is the whole row.

    Returns:
        The cut [N], and a logit [N]: the cut holds for the whole row if this logit lies above all that x leaves out.
    """
    x = jnp.nan_to_num(x, nan=-jnp.inf, neginf=-jnp.inf)
    highest = x.max((1, 2))
    scaled = _scaled(x, highest[:, None, None], limits.temperature)
    cut = jnp.full_like(highest, -jnp.inf)
    if limits.min_p is not None:
        kept = jnp.where(scaled >= jnp.log(limits.min_p)[:, None, None], x, jnp.inf).min((1, 2))
        cut = jnp.where(limits.min_p > 0, jnp.minimum(kept, highest), cut)
    if limits.top_k is not None:
        high = jnp.where(limits.top_k > 0, highest, cut)
        cut = _raise(cut, high, x, jnp.ones_like(x), limits.top_k.astype(x.dtype))
    decisive = cut
    if limits.top_p is not None:
        weights = jnp.exp(scaled)
        mass = _sum_above(x, weights, cut[:, None])[:, 0]
        if total is not None:
            mass = jnp.where(limits.is_restricted, mass, total)
        cut = _raise(cut, jnp.where(limits.top_p < 1, highest, cut), x, weights, limits.top_p * mass)
        decisive = jnp.where(limits.is_restricted, decisive, cut)
    return cut, decisive


def _raise(low: Array, high: Array, x: Array, weights: Array, target: Array) -> Array:
    """Find the largest logit in (low, high] of x [N, C, _BLOCK] such that the weights from it up sum to `target`.

    It is `low` where there is none.
    """
    lowest = jnp.where(x > -jnp.inf, x, jnp.inf).min((1, 2))
    fractions = jnp.linspace(0, 1, _THRESHOLDS, dtype=x.dtype)[None]

    def narrow(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        ends = jnp.maximum(low, lowest), high
        first, last = (jnp.where(jnp.isfinite(end), end, 0) for end in ends)  # infinite in a row without a bracket
        thresholds = first[:, None] * (1 - fractions) + last[:, None] * fractions
        thresholds = jnp.minimum(thresholds, high[:, None])
        reached = _sum_above(x, weights, thresholds) >= target[:, None]
        best_reached = jnp.where(reached, thresholds, low[:, None]).max(-1)
        least_missed = jnp.where(reached, jnp.inf, thresholds).min(-1)
        above = jnp.where(x >= best_reached[:, None, None], x, jnp.inf).min((1, 2))
        below = jnp.where(x < least_missed[:, None, None], x, -jnp.inf).max((1, 2))
        return jnp.where(best_reached > low, above, low), jnp.minimum(high, below)

    return lax.while_loop(lambda bracket: jnp.any(bracket[0] < bracket[1]), narrow, (low, high))[0]


def _sum_above(x: Array, weights: Array, thresholds: Array) -> Array:
    """Sum the weights [N, C, _BLOCK] where x is at least each of the thresholds [N, P], in one read: [N, P]."""
    terms = [jnp.where(x >= threshold[:, None, None], weights, 0) for threshold in thresholds.T]
    zeros = [jnp.zeros((), x.dtype)] * len(terms)
    sums = lax.reduce(terms, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (2,))
    return jnp.stack(sums, 1).sum(-1)


def _scaled(x: Array, highest: Array, temperature: Array | None) -> Array:
    """Return the log-probability of x [N, ...] relative to the row's best token, whose logit is `highest` [N, 1...]."""
    distance = x - jnp.where(highest > -jnp.inf, highest, 0)  # a row without tokens gives -inf
    if temperature is None:
        return distance
    return distance / jnp.where(temperature > 0, temperature, 1).reshape(highest.shape)
