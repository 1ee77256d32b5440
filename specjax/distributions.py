"""Operations on a `Categorical`: the probabilities of tokens, and draws from rows and residuals.

All work of size V is done here, on whole batches of rows, and no array of the size of the logits is written to memory.
A logit of NaN counts as -inf.

Where `axis_name` is given, each device along this axis of a `jax.shard_map` holds a part of the vocabulary, and V is
the size of the part (see `specjax.parallel.shards`). Tokens are ids of the whole vocabulary all the same.
"""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import sample as kernels
from pallas_kernels.rows import BLOCK_SIZE, Batch, marked, unmarked, unsupported_dtype
from specjax.keys import gumbel
from specjax.operations.dispatch import SMALL_VOCAB, as_rows, dispatch
from specjax.operations.reductions import block_sums, first_of_largest, in_memory_order, numbers, row_masses, tempered
from specjax.operations.reductions import widen as widen
from specjax.parallel import shards
from specjax.types import Array, Categorical


class Normalized(NamedTuple):
    """A normalised `Categorical`: log p(v) = (logit(v) - shift) / temperature - log_mass for every kept token v."""

    distribution: Categorical
    shift: Array  # [B, T]
    log_mass: Array  # [B, T], -inf in a row without mass
    argmax: Array | None  # [B, T] int32, the lowest id of the largest logit; None where nothing needs it
    axis_name: str | None = None  # the mesh axis whose devices share the vocabulary, static


class Residual(NamedTuple):
    """The weights max(scale * target - draft, 0) of one row per sequence, without one token, not normalised.

    Where the weights have no mass, a residual stands for the target row itself.
    """

    target: Normalized  # T = 1
    draft: Normalized | None = None  # T = 1; not subtracted where has_draft is False; None subtracts nothing
    has_draft: Array | None = None  # [B] bool, given with `draft`
    scale: Array | None = None  # [B], not applied where has_draft is False; None is 1
    without: Array | None = None  # [B] or [B, N] int32, ids of tokens that are left out; -1 or None leaves out none


def as_categorical(target: Categorical | Array) -> Categorical:
    """Return the distribution itself, or `Categorical(logits)` for an array of logits."""
    return target if isinstance(target, Categorical) else Categorical(target)


def shape_of(distribution: Categorical) -> tuple[int, ...]:
    """Return (B, T, V), whether the logits are dense or packed."""
    if distribution.rows is None:
        return distribution.logits.shape
    return (*distribution.rows.shape, distribution.logits.shape[-1])


def pack(distribution: Categorical) -> Categorical:
    """Return the same distribution with packed logits, which are not copied."""
    logits, temperature, min_logit, log_normalizer, rows, links = distribution
    if rows is not None:
        return distribution
    batch_size, num_rows, vocab_size = logits.shape
    rows = jnp.arange(batch_size * num_rows, dtype=jnp.int32).reshape(batch_size, num_rows)
    min_logit, log_normalizer = (f if f is None else f.reshape(-1) for f in (min_logit, log_normalizer))
    return Categorical(logits.reshape(-1, vocab_size), temperature, min_logit, log_normalizer, rows, links)


def take(distribution: Categorical, index: Array) -> Categorical:
    """Return the rows `index` [B] or [B, T] of each sequence, as a packed distribution over the same logits."""
    packed = pack(distribution)
    assert packed.rows is not None, "packed logits have rows"
    return packed._replace(rows=jnp.take_along_axis(packed.rows, _columns(index), axis=1))


def _columns(index: Array) -> Array:
    """Return numbers [B] as [B, 1], and [B, T] as they are."""
    return index[:, None] if index.ndim == 1 else index


def kept_logits(distribution: Categorical, ids: Array | None = None) -> Array:
    """Return the logits [B, T, V], in at least float32, with -inf below the cut and for NaN.

    With `ids` [B, T, N] they are the logits [B, T, N] of these tokens.
    """
    return numbers(_cut_logits(distribution, ids))


def _cut_logits(distribution: Categorical, ids: Array | None) -> Array:
    """Return the result of `kept_logits`, but NaN may stay: CPUs write the result of a select before exp to memory."""
    logits, min_logit, rows = distribution.logits, distribution.min_logit, distribution.rows
    if ids is not None and rows is not None:
        logits = logits[rows[..., None], ids]
    elif ids is not None:
        logits = jnp.take_along_axis(logits, ids, axis=-1)
    elif rows is not None:
        logits = logits[rows]
    logits = widen(logits)
    if min_logit is None:
        return logits
    cut = _by_row(distribution, min_logit).astype(logits.dtype)
    return jnp.where(logits >= cut[..., None], logits, -jnp.inf)


def normalize(distribution: Categorical, argmax: bool = False, axis_name: str | None = None) -> Normalized:
    """Normalise every row, in one pass over the logits for the maximum and one for the mass.

    No pass is needed where the distribution has a `log_normalizer`. The argmax is computed if there are temperatures,
    which may be 0, or on request.
    """
    stored = in_memory_order(distribution)
    has_best = argmax or distribution.temperature is not None
    if distribution.log_normalizer is not None:
        log_mass = widen(distribution.log_normalizer, stored.logits.dtype)
        shift = jnp.zeros_like(log_mass)
        best = first_of_largest(numbers(stored.logits)) if has_best else None
        if axis_name is not None and best is not None:
            top = jnp.max(numbers(widen(stored.logits)), axis=-1)
            best = _best_of_shards(top, best, stored.logits.shape[-1], axis_name)
    else:
        mass, top, best = row_masses(stored, None, has_best)
        shift = jnp.where(jnp.isfinite(top), top, 0)
        if axis_name is not None:
            shift, mass, best = _join_shards(stored, top, mass, best, axis_name)
        log_mass = jnp.where(mass == 0, -jnp.inf, jnp.log(jnp.where(mass == 0, 1, mass)))
    best = None if best is None else _by_row(distribution, best)
    return Normalized(distribution, _by_row(distribution, shift), _by_row(distribution, log_mass), best, axis_name)


def sampled(distribution: Categorical) -> Categorical:
    """Return a distribution whose greedy rows have temperature 1, so that their tokens have probabilities."""
    if distribution.temperature is None:
        return distribution
    return distribution._replace(temperature=jnp.where(distribution.temperature > 0, distribution.temperature, 1))


def likeliest_probability(distribution: Categorical) -> Array:
    """Return the probability [B, T] float32 of the likeliest token of every row, 0 where a row has no mass."""
    mass, *_ = row_masses(in_memory_order(distribution), None, False)
    return _by_row(distribution, jnp.where(mass > 0, 1 / mass, 0).astype(jnp.float32))


def argmax(distribution: Categorical) -> Array:
    """Return the lowest id [B, T] int32 of the largest logit of every row."""
    return _by_row(distribution, first_of_largest(numbers(in_memory_order(distribution).logits)))


def _join_shards(
    stored: Categorical, top: Array, mass: Array, best: Array | None, axis_name: str
) -> tuple[Array, Array, Array | None]:
    """Return the shift, the mass and the argmax of whole rows, in one exchange.

    Args:
        stored: the distribution whose rows these are.
        top: the largest logit of this device's part of each row.
        mass: the mass of this part relative to the finite `top`, or to 0.
        best: the index of the largest logit in this part, or None.
    """
    own = [top, mass] if best is None else [top, mass, _whole_id(best, stored.logits.shape[-1], axis_name)]
    tops, masses, *ids = jnp.moveaxis(shards.table(jnp.stack([x.astype(top.dtype) for x in own]), axis_name), 1, 0)
    shifts, highest = jnp.where(jnp.isfinite(tops), tops, 0), jnp.max(tops, axis=0)
    shift = jnp.where(jnp.isfinite(highest), highest, 0)
    factor = jnp.exp(jax.vmap(lambda x: tempered(stored, (x - shift)[..., None])[..., 0])(shifts))
    mass = jnp.sum(jnp.where(masses == 0, 0, masses * factor), axis=0)
    return shift, mass, _first_best(tops, ids[0]) if ids else None


def _best_of_shards(top: Array, best: Array, size: int, axis_name: str) -> Array:
    """Return the argmax of whole rows, given the largest logit of this device's part of each and its index there."""
    own = jnp.stack([top, _whole_id(best, size, axis_name).astype(top.dtype)])
    tops, ids = jnp.moveaxis(shards.table(own, axis_name), 1, 0)
    return _first_best(tops, ids)


def _first_best(values: Array, ids: Array) -> Array:
    """Return the id with the largest of the values [n, ...], the first where several are equal."""
    device = jnp.argmax(values, axis=0, keepdims=True)
    return jnp.take_along_axis(ids, device, axis=0)[0].astype(jnp.int32)


def _whole_id(index: Array, size: int, axis_name: str | None) -> Array:
    """Return the ids of tokens, given their index in this device's part of `size` tokens."""
    return index + shards.first_id(size, axis_name)


def normalize_drafts(distribution: Categorical, axis_name: str | None = None) -> Normalized:
    """Normalise the distribution of drafts. Rows of temperature 0 are deterministic, so they need no argmax."""
    known = distribution.log_normalizer is not None
    normalized = normalize(distribution._replace(temperature=None) if known else distribution, axis_name=axis_name)
    return normalized._replace(distribution=distribution, argmax=None)


def take_row(normalized: Normalized, index: Array) -> Normalized:
    """Return the rows `index` [B] or [B, T] of each sequence; [B] gives T = 1."""

    def row(field: Array) -> Array:
        return jnp.take_along_axis(field, _columns(index), axis=1)

    best = None if normalized.argmax is None else row(normalized.argmax)
    return Normalized(
        take(normalized.distribution, index),
        row(normalized.shift),
        row(normalized.log_mass),
        best,
        normalized.axis_name,
    )


def take_rows(normalized: Normalized, start: int, stop: int) -> Normalized:
    """Return the rows from `start` to before `stop` of each sequence."""
    distribution = normalized.distribution
    if distribution.rows is not None:
        distribution = distribution._replace(rows=distribution.rows[:, start:stop])
    else:
        logits, temperature, *fields = distribution
        distribution = Categorical(
            logits[:, start:stop], temperature, *(f if f is None else f[:, start:stop] for f in fields)
        )
    best = None if normalized.argmax is None else normalized.argmax[:, start:stop]
    return Normalized(
        distribution, normalized.shift[:, start:stop], normalized.log_mass[:, start:stop], best, normalized.axis_name
    )


def log_probs(normalized: Normalized, ids: Array | None = None) -> Array:
    """Return the log-probabilities [B, T, V], or [B, T, N] of the tokens with the indices `ids` [B, T, N].

    At temperature 0 the argmax has probability 1. In a row without mass every token has probability 0.
    """
    return _log_probs_of(normalized, kept_logits(normalized.distribution, ids), ids)


def _log_probs_of(normalized: Normalized, logits: Array, ids: Array | None) -> Array:
    """Return the log-probabilities of all tokens, or of the tokens with these indices, given their logits."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None] if ids is None else ids
    return _log_probs(
        normalized, logits, _whole_id(ids, normalized.distribution.logits.shape[-1], normalized.axis_name)
    )


def _log_probs(normalized: Normalized, logits: Array, tokens: Array) -> Array:
    """Return the log-probabilities [B, T, N] of tokens, given their logits [B, T, N], -inf where they are not kept."""
    log_mass = jnp.where(normalized.log_mass == -jnp.inf, 0, normalized.log_mass)
    log_prob = tempered(normalized.distribution, logits - normalized.shift[..., None]) - log_mass[..., None]
    if normalized.argmax is None or normalized.distribution.temperature is None:
        return log_prob
    one_hot = jnp.where((tokens == normalized.argmax[..., None]) & (logits > -jnp.inf), 0, -jnp.inf)
    return jnp.where(normalized.distribution.temperature[:, None, None] == 0, one_hot, log_prob)


def probs(normalized: Normalized, ids: Array | None = None) -> Array:
    """Return the probabilities [B, T, V], or [B, T, N], of what `log_probs` gives the logarithms of."""
    weights = jnp.exp(_log_probs_of(normalized, _cut_logits(normalized.distribution, ids), ids))
    return jnp.where(weights > 0, weights, 0)  # not for NaN


def token_log_prob(normalized: Normalized, tokens: Array) -> Array:
    """Return the log-probability [B, T] of one token in each row, -inf for ids outside [0, V)."""
    size = normalized.distribution.logits.shape[-1]
    index = tokens - shards.first_id(size, normalized.axis_name)
    is_own = (index >= 0) & (index < size)
    logits = kept_logits(normalized.distribution, jnp.where(is_own, index, 0)[..., None])[..., 0]
    logits = shards.of_owner(logits, is_own, normalized.axis_name)
    log_prob = _log_probs(normalized, logits[..., None], tokens[..., None])[..., 0]
    inside = (tokens >= 0) & (tokens < size * shards.num_shards(normalized.axis_name))
    return jnp.where(inside & (log_prob > -jnp.inf), log_prob, -jnp.inf)  # -inf and not NaN in a row without mass


@jax.custom_jvp
def with_gradient(log_prob: Array, target: Categorical, tokens: Array) -> Array:
    """Return given log-probabilities [B, T] of tokens, with the gradient of the target's log-softmax.

    Tokens -1 have log-probability 0.
    """
    return log_prob


@with_gradient.defjvp
def _with_gradient_jvp(primals: tuple[Array, Categorical, Array], tangents: tuple) -> tuple[Array, Array]:
    log_prob, target, tokens = primals

    def recompute(target: Categorical) -> Array:
        normalized = normalize(target._replace(log_normalizer=None))
        return jnp.where(tokens >= 0, token_log_prob(normalized, tokens), 0).astype(log_prob.dtype)

    return log_prob, jax.jvp(recompute, (target,), (tangents[1],))[1]


def entropy(normalized: Normalized) -> Array:
    """Return the entropy [B, T] of every row in nats, where 0 log 0 = 0."""
    log_prob = _log_probs_of(normalized, _cut_logits(normalized.distribution, None), None)
    weights = jnp.exp(log_prob)
    counts = weights > 0  # not where a logit is NaN; 0 * -inf must not be computed
    own = jnp.sum(jnp.where(counts, weights * jnp.where(counts, log_prob, 0), 0), axis=-1)
    return -shards.total(own, normalized.axis_name)


def of_drafts(distribution: Categorical, axis_name: str | None = None) -> Normalized:
    """Do as `normalize_drafts` does, under its former name."""
    warnings.warn("distributions.of_drafts is now called normalize_drafts", DeprecationWarning, stacklevel=2)
    return normalize_drafts(distribution, axis_name)


def take_law(law: Normalized, index: Array) -> Normalized:
    """Do as `take_row` does, under its former name."""
    warnings.warn("distributions.take_law is now called take_row", DeprecationWarning, stacklevel=2)
    return take_row(law, index)


def residual_mass(target: Normalized, draft: Normalized, scale: Array) -> Array:
    """Return the mass [B, T] of max(scale * target - draft, 0), with `scale` [B, T]."""
    difference = scale[..., None] * probs(target) - probs(draft)
    return shards.total(jnp.sum(jnp.maximum(difference, 0), axis=-1), target.axis_name)


def is_among(ids: Array, tokens: Array) -> Array:
    """Return which ids [B, V] or [1, V] are among the tokens [B] or [B, N] of a row, as [B, V] bool."""
    found = jnp.zeros((tokens.shape[0], ids.shape[-1]), bool)
    for token in jnp.moveaxis(_columns(tokens), 1, 0):  # as many compares fuse into one pass
        found |= ids == token[:, None]
    return found


def residual_weights(residual: Residual, ids: Array | None = None, plain: Array | None = None) -> Array:
    """Return the weights [B, V] of a residual, or [B, N] of the tokens with the indices `ids` [B, N].

    Where `plain` [B] is true they are the weights of the target row itself.
    """
    window = None if ids is None else ids[:, None]
    weight = target = probs(residual.target, window)[:, 0]
    if residual.draft is not None:
        assert residual.has_draft is not None, "has_draft is given with draft"
        scaled = target if residual.scale is None else residual.scale[:, None] * target
        difference = jnp.maximum(scaled - probs(residual.draft, window)[:, 0], 0)
        weight = jnp.where(residual.has_draft[:, None], difference, target)
    if residual.without is not None:
        ids = jnp.arange(weight.shape[-1], dtype=jnp.int32)[None] if ids is None else ids
        ids = _whole_id(ids, residual.target.distribution.logits.shape[-1], residual.target.axis_name)
        weight = jnp.where(is_among(ids, residual.without), 0, weight)
    if plain is not None:
        weight = jnp.where(plain[:, None], target, weight)
    return jnp.where(weight > 0, weight, 0)


def residual_probs(residual: Residual) -> Array:
    """Return the probabilities [B, V] that `pick` draws with; token 0 is certain where the target has no mass."""
    weights = residual_weights(residual)
    plain = ~(jnp.sum(weights, axis=-1) > 0)
    weights = jnp.where(plain[:, None], residual_weights(residual, plain=plain), weights)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    weights = jnp.where(mass > 0, weights, (jnp.arange(weights.shape[-1])[None] == 0).astype(weights.dtype))
    return weights / jnp.where(mass > 0, mass, 1)


def pick(residual: Residual, uniforms: Array) -> Array:
    """Draw a `marked` token [B] int32 for every sequence from its residual, by inverse CDF.

    The first of the uniforms [B, 2] chooses a block of the vocabulary, the second a token inside it. One float32
    uniform over a whole vocabulary is too coarse: it would never draw most of the rare tokens.
    """
    size, axis_name = residual.target.distribution.logits.shape[-1], residual.target.axis_name
    block_size = min(BLOCK_SIZE, size)
    num_blocks = -(-size // block_size)  # of this device

    def block_masses(plain: Array | None = None) -> Array:
        own = block_sums(residual_weights(residual, plain=plain), block_size)
        return own if axis_name is None else jnp.concatenate(shards.table(own, axis_name), axis=-1)

    masses = block_masses()
    plain = is_empty = ~(jnp.sum(masses, axis=-1) > 0)
    if residual.draft is not None or residual.without is not None:
        masses = jax.lax.cond(
            jnp.any(plain), lambda: jnp.where(plain[:, None], block_masses(plain), masses), lambda: masses
        )
        is_empty = ~(jnp.sum(masses, axis=-1) > 0)
    block = _first_above(masses, uniforms[:, 0]) - shards.first_id(num_blocks, axis_name)
    is_own = (block >= 0) & (block < num_blocks)
    block = jnp.clip(block, 0, num_blocks - 1)
    ids = block[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)[None]
    weights = residual_weights(residual, jnp.minimum(ids, size - 1), plain)
    index = block * block_size + _first_above(jnp.where(ids < size, weights, 0), uniforms[:, 1])
    token = shards.of_owner(_whole_id(jnp.minimum(index, size - 1), size, axis_name), is_own, axis_name)
    return marked(token, is_empty)


def sample(
    keys: Array, distribution: Categorical, *, implementation: str | None = None, axis_name: str | None = None
) -> Array:
    """Draw a token from every row by Gumbel-max.

    The draw has two levels: it chooses a block of the vocabulary by the log of its mass, then a token in the block. The
    maximum of Gumbel noise added to the logits of a block is distributed as the log of its mass plus one Gumbel number,
    so the tokens have the same distribution, and a row takes V / BLOCK_SIZE + BLOCK_SIZE random numbers instead of V. A
    vocabulary of one block is drawn from directly. Temperature 0 gives the argmax.

    Args:
        keys: typed threefry keys [B, T], one for the noise of each row.
        distribution: of B x T rows.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the case.
        axis_name: the mesh axis whose devices share the vocabulary; None for a whole one.

    Returns:
        Tokens [B, T] int32 in [0, V).

    Raises:
        NotImplementedError: if the named implementation does not support the case.
    """

    def by_kernels(keys: Array, distribution: Categorical, *, interpret: bool) -> Array:
        rows = as_rows(distribution._replace(log_normalizer=None))
        batch = Batch(tokens=None, num_tokens=None, bonus_tokens=None, target=rows, draft=None)
        return kernels.sample(jax.random.key_data(keys), batch, interpret=interpret).tokens

    def reason(keys: Array, distribution: Categorical) -> str | None:
        if keys.size == 0:
            return "the kernels take at least one row, got none"
        if axis_name is not None:
            return "the kernels take whole vocabularies"
        return unsupported_dtype("logits", distribution.logits)

    tokens = dispatch(
        (keys, distribution),
        xla=partial(draw, axis_name=axis_name),
        pallas=by_kernels,
        reason=reason,
        is_worthwhile=lambda keys, distribution: distribution.logits.shape[-1] >= SMALL_VOCAB,
        implementation=implementation,
    )
    return unmarked(tokens)


def draw(keys: Array, distribution: Categorical, axis_name: str | None = None) -> Array:
    """Draw `marked` tokens as `sample` does, by XLA."""
    vocab_size = distribution.logits.shape[-1]
    block_size = min(BLOCK_SIZE, vocab_size)
    stored = in_memory_order(distribution)
    masses, top, best = row_masses(stored, block_size, distribution.temperature is not None)
    shift = jnp.where(jnp.isfinite(top), top, 0)
    if distribution.rows is not None:
        shift, masses = shift[distribution.rows, 0], masses[distribution.rows, 0]
    num_blocks = masses.shape[-1]
    noise = gumbel(keys, (block_size + num_blocks * shards.num_shards(axis_name),))
    start = block_size + shards.first_id(num_blocks, axis_name)
    block_noise = jax.lax.dynamic_slice_in_dim(noise, start, num_blocks, axis=-1).astype(masses.dtype)
    scores = jnp.where(masses > 0, jnp.log(masses) + block_noise, -jnp.inf)
    block = jnp.argmax(scores, axis=-1).astype(jnp.int32)[..., None]
    ids = block * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, None]
    logits = kept_logits(distribution, jnp.minimum(ids, vocab_size - 1)) - shift[..., None]
    logits = tempered(distribution, jnp.where(ids < vocab_size, logits, -jnp.inf))
    inside = jnp.argmax(logits + noise[..., :block_size].astype(logits.dtype), axis=-1).astype(jnp.int32)
    token = jnp.minimum(block[..., 0] * block_size + inside, vocab_size - 1)
    best, score = None if best is None else _by_row(distribution, best), jnp.max(scores, axis=-1)
    if axis_name is not None:
        own = score, _by_row(distribution, top), token, best
        score, token, best = _draw_of_shards(distribution, *own, axis_name)
    if best is not None and distribution.temperature is not None:
        token = jnp.where(distribution.temperature[:, None] == 0, best, token)
    return marked(token, score == -jnp.inf)


def _draw_of_shards(
    distribution: Categorical, score: Array, top: Array, token: Array, best: Array | None, axis_name: str
) -> tuple[Array, Array, Array | None]:
    """Return the score, the draw and the argmax of whole rows [B, T], in one exchange.

    Args:
        distribution: the distribution that is drawn from.
        score: the largest score of a block of this device, for masses relative to the finite `top`, or to 0.
        top: the largest logit of this device.
        token: the draw from the best block of this device, an index in its part.
        best: the index of `top` in this part, or None.
    """
    size = distribution.logits.shape[-1]
    ids = [_whole_id(x, size, axis_name) for x in (token, best) if x is not None]
    table = shards.table(jnp.stack([x.astype(top.dtype) for x in (score, top, *ids)]), axis_name)
    scores, tops, tokens, *bests = jnp.moveaxis(table, 1, 0)
    shifts = jnp.where(jnp.isfinite(tops), tops, 0)
    highest = jnp.max(jnp.where(scores > -jnp.inf, shifts, -jnp.inf), axis=0)
    distance = jnp.where(scores > -jnp.inf, shifts - highest[None], 0)
    scores = scores + jax.vmap(lambda x: tempered(distribution, x[..., None])[..., 0])(distance)
    best = _first_best(tops, bests[0]) if bests else None
    return jnp.max(scores, axis=0), _first_best(scores, tokens), best


def _by_row(distribution: Categorical, field: Array) -> Array:
    """Return a field of a distribution as [B, T]; it is [B, T], or [R] or [R, 1] where the logits are packed."""
    return field if distribution.rows is None else field.reshape(-1)[distribution.rows]


def _first_above(weights: Array, uniform: Array) -> Array:
    """Return the first index [B] at which the running sum of weights [B, N] exceeds uniform * mass.

    It is never an index of weight 0, and 0 if there is no mass.
    """
    total = jnp.cumsum(weights, axis=-1)
    mass = total[:, -1:]
    bound = jnp.minimum(uniform[:, None].astype(mass.dtype) * mass, jnp.nextafter(mass, jnp.zeros_like(mass)))
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
    return jnp.min(jnp.where((weights > 0) & (total > bound), index, last[:, None]), axis=-1)
