"""Top-k, top-p and min-p as a cut on the logits: the smallest logit that a row keeps, found without a sort.

One read gives the maximum of every block of neighbouring tokens. The blocks with the largest maxima are gathered; they
hold every logit above the smallest of those maxima, so a cut found in them that lies above it is the cut of the row.
Rows where it does not lie above, as with a very flat law, are searched whole, a few at a time.

The search tries several thresholds a read, evenly between two logits of the row, counts what lies above each of them or
sums its mass, and goes on between the logits next to the answer until they meet.

`search.py` does the same in kernels.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.rows import is_partitioned
from pallas_kernels.search import Limits, search
from pallas_kernels.triton import plgpu

_BLOCK = 64  # tokens
_CANDIDATES = 128  # blocks of a row that are searched first
_THRESHOLDS = 8  # tried per read
_SMALL_VOCAB = 2048  # below it a few fused operations do as well as kernels
_LARGEST_VOCAB = 2**19  # the maxima of all blocks of a row are in registers at once


def min_logit(
    logits: Array,
    *,
    temperature: Array | None = None,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Find the smallest logit that min-p, then top-k, then top-p keep of softmax(logits / temperature).

    A token is kept iff `logits >= min_logit`, compared in the dtype of the result: the best token always, and all ties
    of the last one. min-p keeps what is at least `min_p` times as probable as the best token; top-k the `top_k` best of
    that; top-p the fewest of those, best first, that hold `top_p` of their mass. NaN counts as -inf: not a token.

    Masses round in float32: the cut is the exact one of a `top_p` and a `min_p` within 1e-6 of the given ones, relative
    (1e-13 in float64). It moves the cut only where a cumulated mass falls that close.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64.
        temperature: broadcastable to [...], None is 1. Rows of temperature 0 are greedy and not cut.
        top_k: broadcastable to [...], integer; off where <= 0 or >= V. None leaves it out of the program.
        top_p: broadcastable to [...]; off where >= 1, None as for top_k.
        min_p: broadcastable to [...]; off where <= 0, None as for top_k.
        implementation: "xla"; "pallas" for the kernels, "interpret" for these without a GPU; None for the faster one on
            the platform.

    Returns:
        [...] in promote_types(logits.dtype, float32). -inf where nothing is on; where only top-k is, and the row has
        fewer tokens; and for a row without tokens.

    Raises:
        NotImplementedError: for a named implementation that does not support the case.
        ValueError: for a wrong shape or dtype.

    Example:
        >>> min_logit(jnp.array([3.0, 1.0, 2.0, 2.0]), top_k=jnp.array(2))
        Array(2., dtype=float32)
    """
    if implementation not in (None, "xla", "pallas", "interpret"):
        raise ValueError(f"implementation must be None, 'xla', 'pallas' or 'interpret', got {implementation!r}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be of floating dtype, got {logits.dtype}")
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    shape, dtype = logits.shape[:-1], jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    uncut = jnp.full_like(logits, -jnp.inf, dtype, shape)
    if logits.size == 0 or (top_k is None and top_p is None and min_p is None):
        return uncut
    logits = logits.reshape(-1, logits.shape[-1])
    num_rows, vocab_size = logits.shape

    def by_row(name: str, kind: type = jnp.number) -> Array:
        values = jnp.asarray(given[name])
        if not jnp.issubdtype(values.dtype, kind):
            raise ValueError(f"{name} must be of {kind.__name__} dtype, got {values.dtype}")
        sizes = zip(reversed(values.shape), reversed(shape), strict=False)
        if values.ndim > len(shape) or any(size not in (1, rows) for size, rows in sizes):
            raise ValueError(f"{name} must be broadcastable to {shape}, got shape {values.shape}")
        return jnp.broadcast_to(values, shape).reshape(-1)

    is_sampled = jnp.ones(num_rows, bool)
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
    limits = Limits(temperature, top_k, top_p, min_p)

    def by_xla(logits: Array, limits: Limits) -> Array:
        return lax.cond(limits.is_asked.any(), lambda: _cut(logits, limits, dtype), lambda: uncut.reshape(-1))

    lack = _unsupported(logits)
    if implementation in ("pallas", "interpret"):
        if lack is not None:
            raise NotImplementedError(f"implementation={implementation!r} supports {lack}")
        cut = search(logits, limits, interpret=implementation == "interpret")
    elif implementation is None and lack is None and vocab_size >= _SMALL_VOCAB and not is_partitioned(logits):
        cut = lax.platform_dependent(logits, limits, cuda=search, default=by_xla)
    else:
        cut = by_xla(logits, limits)
    return cut.reshape(shape)


def _unsupported(logits: Array) -> str | None:
    """What the kernels support and these logits are not; None if they support them."""
    if plgpu is None:
        return f"a JAX with the Triton backend of Pallas, not {jax.__version__}"
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"logits of dtype float32, bfloat16 or float16, not {logits.dtype}"
    if logits.shape[-1] > _LARGEST_VOCAB:
        return f"at most {_LARGEST_VOCAB} tokens, not {logits.shape[-1]}"
    return None


def _cut(logits: Array, limits: Limits, dtype: jnp.dtype) -> Array:
    """The cut [R] of logits [R, V]."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)

    def in_blocks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, num_blocks * _BLOCK - vocab_size)), constant_values=-jnp.inf)
        return padded.reshape(x.shape[0], num_blocks, _BLOCK)

    if num_blocks <= _CANDIDATES:
        return _search(in_blocks(logits).astype(dtype), limits)[0]

    best, blocks = lax.top_k(in_blocks(logits).max(-1).astype(dtype), _CANDIDATES)
    outside = best.min(-1)  # no logit outside these blocks is larger
    tokens = blocks[:, :, None] * _BLOCK + jnp.arange(_BLOCK)[None, None]
    candidates = logits.at[jnp.arange(num_rows)[:, None, None], tokens].get(mode="fill", fill_value=-jnp.inf)
    total = None
    if limits.top_p is not None:
        total = lax.cond(
            jnp.any((limits.top_p < 1) & ~limits.is_restricted),
            lambda: jnp.exp(_scaled(logits.astype(dtype), best.max(-1, keepdims=True), limits.temperature)).sum(-1),
            lambda: jnp.zeros_like(outside),
        )
    cut, decisive = _search(candidates.astype(dtype), limits, total)

    clean = ~jnp.isnan(logits).any(-1)  # a maximum of NaN and numbers is not the same on every device
    settled = ~limits.is_asked | (clean & ((decisive > outside) | (outside == -jnp.inf)))
    unsettled_first = jnp.argsort(settled)
    chunk = min(num_rows, max(4, num_rows // 16))

    def search_whole(i: Array, cut: Array) -> Array:
        rows = lax.dynamic_slice(unsettled_first, (i * chunk,), (chunk,))
        # Without the barrier XLA may convert all bfloat16 logits to float32 before the loop.
        whole = lax.optimization_barrier((logits, rows))[0][rows]
        found, _ = _search(in_blocks(whole).astype(dtype), jax.tree.map(lambda limit: limit[rows], limits))
        return cut.at[rows].set(found)

    return lax.fori_loop(0, -(-jnp.sum(~settled) // chunk), search_whole, cut)


def _search(x: Array, limits: Limits, total: Array | None = None) -> tuple[Array, Array]:
    """Find the cut of x [N, C, _BLOCK], which may be a part of each row.

    Args:
        x: candidates in any order.
        limits: of the N rows.
        total: [N] mass of the whole row, for rows that are not restricted; None where x is the whole row.

    Returns:
        The cut [N], and [N] what must lie above all that x leaves out for it to be the cut of the whole row.
    """
    x = jnp.nan_to_num(x, nan=-jnp.inf, neginf=-jnp.inf)
    highest = x.max((1, 2))
    scaled = _scaled(x, highest[:, None, None], limits.temperature)
    cut = jnp.full_like(highest, -jnp.inf)
    if limits.min_p is not None:
        kept = jnp.where(scaled >= jnp.log(limits.min_p)[:, None, None], x, jnp.inf).min((1, 2))
        cut = jnp.where(limits.min_p > 0, jnp.minimum(kept, highest), cut)
    if limits.top_k is not None:
        cut = _raise(cut, jnp.where(limits.top_k > 0, highest, cut), x, jnp.ones_like(x), limits.top_k.astype(x.dtype))
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
    """Find the largest logit in (low, high] of x [N, C, _BLOCK] from which up weights sum to `target`, else low."""
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
    """Sum the weights [N, C, _BLOCK] where x >= thresholds [N, P], in one read: [N, P]."""
    terms = [jnp.where(x >= threshold[:, None, None], weights, 0) for threshold in thresholds.T]
    zeros = [jnp.zeros((), x.dtype)] * len(terms)
    sums = lax.reduce(terms, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (2,))
    return jnp.stack(sums, 1).sum(-1)


def _scaled(x: Array, highest: Array, temperature: Array | None) -> Array:
    """Log-probability of x [N, ...] relative to the row's best token, whose logit is `highest` [N, 1...]."""
    distance = x - jnp.where(highest > -jnp.inf, highest, 0)  # a row without tokens gives -inf
    if temperature is None:
        return distance
    return distance / jnp.where(temperature > 0, temperature, 1).reshape(highest.shape)
