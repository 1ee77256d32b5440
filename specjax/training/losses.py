"""Losses that bring a drafter's distribution to its target's: pure functions of logits, one value a row.

Below, p is the target's distribution of one row, q the drafter's, and alpha = sum(min(p, q)) the probability
that `verifiers.rejection` accepts a draft of q.

With a reduced draft vocabulary of D tokens (`vocab=`), draft logits are [..., D]. Divergences then compare q with p
renormalised on these tokens, as no q could have mass elsewhere. Rates and the total variation do not renormalise: mass
of p outside is rejected.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.training.vocabulary import Vocabulary
from specjax.types import Array, PyTree
from specjax.validation import check_number, is_integer

__all__ = [
    "acceptance_rate",
    "calibrate",
    "confidence_loss",
    "cross_entropy",
    "expected_tokens",
    "forward_kl",
    "from_hidden",
    "jensen_shannon",
    "lk_hybrid",
    "negative_log_acceptance",
    "position_decay",
    "prefix_weights",
    "reverse_kl",
    "text_and_variation",
    "total_variation",
]

TINY = float(np.finfo(np.float32).tiny)
Loss = Callable[..., PyTree]  # (draft_logits [..., D], target_logits [..., V], [tokens [...]], vocab=) -> arrays [...]


def forward_kl(draft_logits: Array, target_logits: Array, *, vocab: Vocabulary | None = None) -> Array:
    """Compute KL(p || q), the cross entropy of the whole distribution p less its entropy.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        target_logits: [..., V].
        vocab: the draft vocabulary; None is the whole one.

    Returns:
        [...] float32 (float64 of float64 logits); the gradient by the draft logits is q - p.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> float(forward_kl(jnp.zeros(4), jnp.zeros(4)))
        0.0
    """
    log_target, log_draft = _log_probs(draft_logits, target_logits, vocab)
    return _divergence(log_target, log_draft)


def reverse_kl(draft_logits: Array, target_logits: Array, *, vocab: Vocabulary | None = None) -> Array:
    """Compute KL(q || p), which lets q leave out mass of p. Arguments and result are as for `forward_kl`."""
    log_target, log_draft = _log_probs(draft_logits, target_logits, vocab)
    return _divergence(log_draft, log_target)


def jensen_shannon(draft_logits: Array, target_logits: Array, *, vocab: Vocabulary | None = None) -> Array:
    """Compute the Jensen-Shannon divergence, at most log 2. Arguments and result are the same as for `forward_kl`."""
    log_target, log_draft = _log_probs(draft_logits, target_logits, vocab)
    log_mean = jnp.logaddexp(log_target, log_draft) - jnp.log(2.0).astype(log_draft.dtype)
    return (_divergence(log_target, log_mean) + _divergence(log_draft, log_mean)) / 2


def cross_entropy(draft_logits: Array, tokens: Array, *, vocab: Vocabulary | None = None) -> Array:
    """Compute -log q(token), of tokens of the text or of the target's greedy ones.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        tokens: [...] integers, the target's ids.
        vocab: the draft vocabulary; None is the whole one. Rows whose token it lacks are 0 and teach nothing.

    Returns:
        [...] float32 (float64 of float64 logits).

    Raises:
        ValueError: the shapes do not fit.
    """
    draft_logits, tokens = jnp.asarray(draft_logits), jnp.asarray(tokens)
    if draft_logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens must have the shape {draft_logits.shape[:-1]} of the draft logits, got {tokens.shape}"
        )
    log_draft = jax.nn.log_softmax(_floats(draft_logits))
    if vocab is None:
        return -jnp.take_along_axis(log_draft, tokens[..., None], axis=-1)[..., 0]
    _check_vocabulary(draft_logits, vocab)
    ids = jnp.asarray(vocab.ids)
    index = jnp.minimum(jnp.searchsorted(ids, tokens), len(ids) - 1)
    values = -jnp.take_along_axis(log_draft, index[..., None], axis=-1)[..., 0]
    return jnp.where(ids[index] == tokens, values, 0)


def total_variation(draft_logits: Array, target_logits: Array, *, vocab: Vocabulary | None = None) -> Array:
    """Compute sum(|p - q|) / 2 = 1 - alpha, the probability that a draft is rejected.

    Its gradient vanishes where p and q hardly overlap, so training starts with another loss. Arguments and result are
    the same as for `forward_kl`.
    """
    target, draft = _probs(draft_logits, target_logits, vocab)
    outside = 0.0 if vocab is None else 1 - jnp.sum(target, axis=-1)
    return (jnp.sum(jnp.abs(target - draft), axis=-1) + outside) / 2


def acceptance_rate(
    draft_logits: Array, target_logits: Array, *, temperature: float = 1.0, vocab: Vocabulary | None = None
) -> Array:
    """Compute alpha = sum(min(p, q)), the probability that `verifiers.rejection` accepts a draft.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        target_logits: [..., V].
        temperature: of both distributions; 0 gives 1 where the most likely tokens agree and 0 elsewhere.
        vocab: the draft vocabulary; None is the whole one.

    Returns:
        [...] float32 (float64 of float64 logits) in [0, 1].

    Raises:
        ValueError: the shapes do not fit, or the temperature is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> p, q = jnp.log(jnp.array([0.5, 0.25, 0.25])), jnp.log(jnp.array([0.25, 0.25, 0.5]))
        >>> float(acceptance_rate(q, p))
        0.75
    """
    check_number("temperature", temperature, "one number >= 0", 0, np.inf)
    if temperature == 0:
        _check(draft_logits, target_logits, vocab)
        best = jnp.argmax(draft_logits, axis=-1)
        best = best if vocab is None else jnp.asarray(vocab.ids)[best]
        return (best == jnp.argmax(target_logits, axis=-1)).astype(_floats(draft_logits).dtype)
    target, draft = _probs(_floats(draft_logits) / temperature, _floats(target_logits) / temperature, vocab)
    return jnp.sum(jnp.minimum(target, draft), axis=-1)


def negative_log_acceptance(
    draft_logits: Array, target_logits: Array, *, floor: float = 1e-5, vocab: Vocabulary | None = None
) -> Array:
    """Compute -log(alpha): the direction of the total variation's gradient, at a size that does not vanish.

    For a target that is certain of a token it is the cross entropy of that token.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        target_logits: [..., V].
        floor: a smaller alpha counts as this number, and has no gradient.
        vocab: the draft vocabulary; None is the whole one.

    Returns:
        [...] float32 (float64 of float64 logits).

    Raises:
        ValueError: the shapes do not fit, or the floor is not in (0, 1].
    """
    check_number("floor", floor, "one number in (0, 1]", TINY, 1)
    return -jnp.log(jnp.maximum(acceptance_rate(draft_logits, target_logits, vocab=vocab), floor))


def lk_hybrid(
    draft_logits: Array,
    target_logits: Array,
    *,
    scale: float = 1.0,
    decay: float = 3.0,
    vocab: Vocabulary | None = None,
) -> Array:
    """Mix the two: w KL(p || q) + (1 - w) TV with w = scale exp(-decay alpha), so that the divergence leads at first.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        target_logits: [..., V].
        scale: the weight of the divergence where p and q do not overlap, in [0, 1].
        decay: how fast this weight falls as alpha grows, >= 0. It is a constant for the gradient.
        vocab: the draft vocabulary; None is the whole one.

    Returns:
        [...] float32 (float64 of float64 logits).

    Raises:
        ValueError: the shapes do not fit, or a number is out of its range.
    """
    check_number("scale", scale, "one number in [0, 1]", 0, 1)
    check_number("decay", decay, "one number >= 0", 0, np.inf)
    variation = total_variation(draft_logits, target_logits, vocab=vocab)
    weight = scale * jnp.exp(-decay * jax.lax.stop_gradient(1 - variation))
    return weight * forward_kl(draft_logits, target_logits, vocab=vocab) + (1 - weight) * variation


def text_and_variation(
    draft_logits: Array,
    target_logits: Array,
    tokens: Array,
    *,
    text_weight: float = 0.1,
    vocab: Vocabulary | None = None,
) -> Array:
    """Mix the text and the target: w (-log q(token)) + (1 - w) sum(|p - q|), as DSpark is trained.

    The sum is twice the total variation; the cross entropy leads where p and q hardly overlap.

    Args:
        draft_logits: [..., V], or [..., D] with `vocab`.
        target_logits: [..., V].
        tokens: [...] integers, the target's ids of the text.
        text_weight: w, in [0, 1].
        vocab: the draft vocabulary; None is the whole one. A token that it lacks has no cross entropy.

    Returns:
        [...] float32 (float64 of float64 logits).

    Raises:
        ValueError: the shapes do not fit, or the weight is out of its range.
    """
    check_number("text_weight", text_weight, "one number in [0, 1]", 0, 1)
    variation = total_variation(draft_logits, target_logits, vocab=vocab)
    return text_weight * cross_entropy(draft_logits, tokens, vocab=vocab) + (1 - text_weight) * 2 * variation


def expected_tokens(rates: Array) -> Array:
    """Compute the expected tokens of a step, 1 + sum_j prod_{i <= j} rate_i, whose negative is a loss.

    It is exact for `verifiers.rejection` where the acceptance of a draft does not depend on which tokens were drafted
    before it.

    Args:
        rates: [..., K], the acceptance rate of each draft given that those before it were accepted.

    Returns:
        [...] floats in [1, K + 1], the recovered or bonus token counted.

    Example:
        >>> import jax.numpy as jnp
        >>> float(expected_tokens(jnp.array([0.5, 0.5])))
        1.75
    """
    return 1 + jnp.sum(jnp.cumprod(rates, axis=-1), axis=-1)


def prefix_weights(probs: Array, *, floor: float = 0.5) -> Array:
    """Weigh each position of a block by its worth: the expected accepted drafts that depend on it.

    With s = (1 - floor) q(x) + floor of every position, weight i is sum_{j >= i} prod_{l <= j} s_l. It is a constant
    for the gradient and multiplies a cross entropy.

    Args:
        probs: [..., K], the probability q(x) that the drafter gives the true token of each position.
        floor: in [0, 1], keeps weights of later positions from vanishing.

    Returns:
        [..., K] of the dtype of `probs`.

    Raises:
        ValueError: the floor is not in [0, 1].
    """
    check_number("floor", floor, "one number in [0, 1]", 0, 1)
    survives = jnp.cumprod((1 - floor) * jax.lax.stop_gradient(probs) + floor, axis=-1)
    return jnp.flip(jnp.cumsum(jnp.flip(survives, axis=-1), axis=-1), axis=-1)


def position_decay(num_positions: int, *, ratio: float | None = None, gamma: float | None = None) -> Array:
    """Return fixed weights of the positions of a block, ratio^j or exp(-j / gamma) for j = 0, 1, ...

    Args:
        num_positions: K >= 1.
        ratio: in (0, 1], or None.
        gamma: > 0, or None. Exactly one of the two is given.

    Returns:
        [K] float32.

    Raises:
        ValueError: a number is out of its range, or not exactly one of `ratio` and `gamma` is given.

    Example:
        >>> position_decay(3, ratio=0.5)
        Array([1.  , 0.5 , 0.25], dtype=float32)
    """
    if not is_integer(num_positions) or num_positions < 1:
        raise ValueError(f"num_positions must be an integer >= 1, got {num_positions!r}")
    if (ratio is None) == (gamma is None):
        raise ValueError(f"give exactly one of ratio and gamma, got {ratio!r} and {gamma!r}")
    if ratio is None:
        check_number("gamma", gamma, "one number > 0", TINY, np.inf)
        assert gamma is not None, "one of the two is given"
        ratio = float(np.exp(-1 / gamma))
    else:
        check_number("ratio", ratio, "one number in (0, 1]", TINY, 1)
    return jnp.asarray(ratio ** np.arange(num_positions), jnp.float32)


def confidence_loss(confidence_logits: Array, rates: Array) -> Array:
    """Compute the binary cross entropy of sigmoid(confidence) against acceptance rates, constants for the gradient.

    Args:
        confidence_logits: [...] floats.
        rates: [...] floats in [0, 1].

    Returns:
        [...] float32 (float64 of float64 logits). It is least where sigmoid(confidence) is the rate.
    """
    logits, rates = _floats(confidence_logits), jax.lax.stop_gradient(jnp.asarray(rates))
    return jax.nn.softplus(logits) - rates * logits


def calibrate(confidence_logits: ArrayLike, accepted: ArrayLike) -> np.ndarray:
    """Fit one temperature for each position, so that confidences predict how far a draft is accepted.

    Position k is fitted after those before it: its temperature makes prod_{i <= k} sigmoid(logit_i / temperature_i)
    most likely as the probability that the first k drafts were accepted. The search is on the host, in float64, over
    temperatures from 1/20 to 20.

    Args:
        confidence_logits: [N, K] floats, of N held-out drafts.
        accepted: [N, K] bool, whether a draft and all before it were accepted.

    Returns:
        [K] float64 temperatures.

    Raises:
        ValueError: the arguments have not the same shape [N, K], or N is 0.

    References:
        Sequential temperature scaling, as DSpark does it.
    """
    logits, outcomes = np.asarray(confidence_logits, np.float64), np.asarray(accepted, bool)
    if logits.ndim != 2 or logits.shape != outcomes.shape or not logits.size:
        raise ValueError(
            f"confidence_logits and accepted must have one shape [N, K], got {logits.shape} and {outcomes.shape}"
        )
    before, temperatures = np.zeros(len(logits)), []
    for logit, outcome in zip(logits.T, outcomes.T, strict=True):
        low, high = np.log(1 / 20), np.log(20)
        for _ in range(4):  # each search is 50 times finer than the last
            grid = np.linspace(low, high, 101)
            cost = [_surprise(before + _log_sigmoid(logit / np.exp(x)), outcome) for x in grid]
            best = grid[np.argmin(cost)]
            width = (high - low) / 100
            low, high = max(best - width, low), min(best + width, high)
        temperatures.append(np.exp(best))
        before = before + _log_sigmoid(logit / temperatures[-1])
    return np.array(temperatures)


def from_hidden(
    loss: Loss,
    hidden: PyTree,
    head: Array | Callable[[PyTree], Array],
    target_hidden: PyTree,
    target_head: Array | Callable[[PyTree], Array],
    *,
    mask: Array,
    tokens: Array | None = None,
    chunk: int = 256,
    vocab: Vocabulary | None = None,
) -> PyTree:
    """Compute a loss of hidden states without logits of all rows: no [N, V] array lives, nor is kept for the gradient.

    Rows go through both heads a chunk at a time, and once more in the gradient. A chunk has rows of all sequences, so
    that devices which share the batch work on each chunk together.

    Args:
        loss: a loss of this module with its options bound by `functools.partial`, or any function
            `(draft_logits [chunk, D], target_logits [chunk, V], vocab=) -> arrays [chunk]`, one or a pytree of them.
        hidden: [..., h], input of the drafter's head; or a pytree of arrays [..., *] that `head` takes.
        head: [V, h], or [D, h] with `vocab`; or a function of rows [chunk, h] that returns their logits.
        target_hidden: [..., H], input of the target's head; or a pytree of arrays [..., *] that `target_head` takes. It
            is a constant for the gradient.
        target_head: [V, H], or a function of rows [chunk, H] that returns their logits; a constant too.
        mask: [...] bool, the rows that count. The loss of the others is 0. Its first axis is the batch, if it has two.
        tokens: [...] integers for a loss that reads them, which gets the integers of a chunk as its third argument; or
            None.
        chunk: rows whose logits exist at a time, >= 1, but at least one of each sequence.
        vocab: the draft vocabulary; None is the whole one.

    Returns:
        [...] arrays, one or a pytree of them as the loss returns.

    Raises:
        ValueError: the shapes do not fit.
    """
    if not is_integer(chunk) or chunk < 1:
        raise ValueError(f"chunk must be an integer >= 1, got {chunk!r}")
    shape, given = mask.shape, (hidden, jax.lax.stop_gradient(target_hidden), mask, tokens)
    shapes = [x.shape for x in jax.tree.leaves(given)]
    if any(one[: len(shape)] != shape for one in shapes):
        raise ValueError(f"hidden, target_hidden, mask and tokens must have the same rows, got the shapes {shapes}")
    batch_size = shape[0] if len(shape) > 1 else 1
    num_rows = mask.size // batch_size  # of a sequence
    width = max(1, chunk // batch_size)
    num_chunks = -(-num_rows // width)

    def chunks(x: Array) -> Array:
        rest = x.shape[len(shape) :]
        rows = x.reshape(batch_size, num_rows, *rest)
        rows = jnp.pad(rows, ((0, 0), (0, num_chunks * width - num_rows), *((0, 0),) * len(rest)))
        return jnp.moveaxis(rows.reshape(batch_size, num_chunks, width, *rest), 1, 0)

    @jax.checkpoint
    def of_chunk(given: PyTree) -> PyTree:
        hidden, target_hidden, mask, tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), given)
        options: dict[str, Any] = {} if vocab is None else {"vocab": vocab}
        target_logits = _logits(target_hidden, target_head)
        logits = _logits(hidden, head), jax.lax.stop_gradient(target_logits)
        values = loss(*logits, **options) if tokens is None else loss(*logits, tokens, **options)
        return jax.tree.map(lambda x: jnp.where(mask, x, 0).reshape(batch_size, width), values)

    values = jax.lax.scan(lambda carry, rows: (carry, of_chunk(rows)), None, jax.tree.map(chunks, given))[1]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch_size, -1)[:, :num_rows].reshape(shape), values)


def _logits(hidden: PyTree, head: Array | Callable[[PyTree], Array]) -> Array:
    if callable(head):
        return head(hidden)
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("td,vd->tv", hidden, head.astype(hidden.dtype), preferred_element_type=dtype)


def _floats(logits: ArrayLike) -> Array:
    logits = jnp.asarray(logits)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _check_vocabulary(draft_logits: Array, vocab: Vocabulary) -> None:
    if draft_logits.shape[-1] != len(vocab.ids):
        raise ValueError(
            f"draft_logits must have D = {len(vocab.ids)} tokens, those of vocab, got {draft_logits.shape}"
        )


def _check(draft_logits: Array, target_logits: Array, vocab: Vocabulary | None) -> None:
    """Raise ValueError unless the shapes fit."""
    draft_shape, target_shape = jnp.shape(draft_logits), jnp.shape(target_logits)
    if draft_shape[:-1] != target_shape[:-1]:
        raise ValueError(f"draft and target logits must have the same rows, got {draft_shape} and {target_shape}")
    if vocab is None and draft_shape != target_shape:
        raise ValueError(
            f"draft_logits must have the target's vocabulary, {target_shape[-1]} tokens, or come with vocab, "
            f"got {draft_shape[-1]}"
        )
    if vocab is not None:
        _check_vocabulary(draft_logits, vocab)
        if target_shape[-1] != len(vocab.t2d):
            raise ValueError(f"target_logits must have V = {len(vocab.t2d)} tokens, those of vocab, got {target_shape}")


def _log_probs(draft_logits: Array, target_logits: Array, vocab: Vocabulary | None) -> tuple[Array, Array]:
    """Return log p, renormalised on the draft vocabulary, and log q."""
    _check(draft_logits, target_logits, vocab)
    target_logits = _floats(target_logits)
    if vocab is not None:
        target_logits = _held(target_logits, vocab)
    return jax.nn.log_softmax(target_logits), jax.nn.log_softmax(_floats(draft_logits))


def _probs(draft_logits: Array, target_logits: Array, vocab: Vocabulary | None) -> tuple[Array, Array]:
    """Return p on the draft vocabulary, not renormalised, and q."""
    _check(draft_logits, target_logits, vocab)
    target = jax.nn.softmax(_floats(target_logits))
    return target if vocab is None else _held(target, vocab), jax.nn.softmax(_floats(draft_logits))


def _held(values: Array, vocab: Vocabulary) -> Array:
    """Return the values [..., D] of a draft vocabulary, of [..., V]. A vocabulary of the first D tokens is a slice."""
    count = len(vocab.ids)
    if isinstance(vocab.ids, np.ndarray) and vocab.ids[-1] == count - 1:
        return values[..., :count]
    return values[..., jnp.asarray(vocab.ids)]


def _divergence(log_first: Array, log_second: Array) -> Array:
    """Return KL(first || second). Tokens that the first excludes add nothing."""
    is_held = log_first > -jnp.inf
    log_first, log_second = (jnp.where(is_held, x, 0) for x in (log_first, log_second))
    return jnp.sum(jnp.where(is_held, jnp.exp(log_first) * (log_first - log_second), 0), axis=-1)


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def _surprise(log_probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the mean of -log P(outcome), where outcomes are true with the given log-probabilities."""
    failure = np.log(np.maximum(-np.expm1(log_probs), np.finfo(np.float64).tiny))
    return -float(np.mean(np.where(outcomes, log_probs, failure)))
