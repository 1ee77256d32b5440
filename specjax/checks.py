"""Checks of the values of drafts and targets on the host, for debugging and for servers that do not trust their input.

Verifiers check shapes and dtypes. They cannot check values, which are traced.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.distributions import as_categorical, take
from specjax.trees.verifier import check_tree
from specjax.types import Array, Categorical, Draft, DraftTree
from specjax.validation import check_bonus_tokens, check_shapes, is_traced

__all__ = ["validate"]

TOLERANCE = 1e-3  # the error of a log-normaliser that passes; a float32 sum over a large vocabulary has a smaller one


def validate(
    draft: Draft | DraftTree, target: Categorical | Array, bonus_tokens: Array | None = None, *, strict: bool = False
) -> None:
    """Check the values that a verifier cannot check. This is slow, because it reads all logits on the host.

    By default only values that a verifier reads are checked: the rows of a sequence's own drafts and the row after
    them, without the logits of drafts of temperature 0. With `strict` the other values are checked too. A server that
    fills its padding with known values then learns of a stale id or an overflow in the step in which it appears, and
    not in the step that reads it.

    Packed batches are checked by `ragged.verify(lambda keys, *batch: checks.validate(*batch), ...)`. Inside jit use
    `jax.debug.callback(checks.validate, draft, target)`.

    Args:
        draft: the tokens [B, K] in [0, V), then -1; ids past num_tokens [B] may be anything. Each token must have a
            positive probability under its distribution. In a tree every node stands after its parent, one deeper than
            it. Where it has a distribution, siblings differ, and -1 follows the last of them.
        target: a Categorical, or logits [B, K+1, V], finite or -inf, with at least one kept token in each row. Its
            temperatures must be finite and >= 0, and its log_normalizer must agree with the logits. With `rows`, all
            sequences that read a row in memory must have the same temperature.
        bonus_tokens: [B] in [0, V), or None.
        strict: whether to check ids past num_tokens as if they were drafts, and to refuse NaN and +inf in every
            logit, cut and log-normaliser.

    Raises:
        ValueError: a value is wrong. The message names the field, the index and the value.

    Example:
        >>> import jax.numpy as jnp
        >>> from specjax import Draft
        >>> validate(Draft(jnp.array([[1, 0]])), jnp.zeros((1, 3, 2)))
        >>> validate(Draft(jnp.array([[1, 5]])), jnp.zeros((1, 3, 2)))
        Traceback (most recent call last):
            ...
        ValueError: draft.tokens[0, 1] must be -1 or in [0, V = 2), got 5
    """
    scored = as_categorical(target)
    if isinstance(draft, DraftTree):
        _validate_tree(draft, scored)
        return
    check_shapes(draft, scored, bonus_tokens)
    if is_traced(draft, scored, bonus_tokens):
        raise ValueError("draft, target and bonus_tokens must be concrete arrays, got traced ones: call outside jit")
    chain: Draft
    chain, scored = jax.tree.map(np.asarray, (draft, scored))
    vocab_size, reported = scored.logits.shape[-1], chain.distribution
    is_draft = _validate_tokens(chain, vocab_size, strict)
    check_bonus_tokens(bonus_tokens, vocab_size)
    if strict:
        _validate_numbers("target", scored)
        if reported is not None:
            _validate_numbers("draft.distribution", reported)

    is_read = np.arange(is_draft.shape[1] + 1) <= is_draft.sum(axis=1)[:, None]
    _validate_categorical("target", scored, is_read)
    if reported is not None and is_draft.shape[1]:
        is_sampled = is_draft
        if reported.temperature is not None:
            is_sampled = is_draft & (np.asarray(reported.temperature) != 0)[:, None]
        _validate_categorical("draft.distribution", reported, is_sampled, chain.tokens)


def _validate_tree(tree: DraftTree, target: Categorical) -> None:
    """Raise ValueError for a wrong value of a tree or of its target."""
    check_tree(tree, target)
    if is_traced(tree, target):
        raise ValueError("draft and target must be concrete arrays, got traced ones: call outside jit")
    tree, target = jax.tree.map(np.asarray, (tree, target))
    tokens, parents, depth = (np.asarray(field) for field in tree[:3])
    (batch_size, size), vocab_size = tokens.shape, target.logits.shape[-1]
    count = np.full(batch_size, size) if tree.num_nodes is None else np.asarray(tree.num_nodes)
    _require("tree.num_nodes", count, (count >= 1) & (count <= size), f"in [1, N = {size}]")
    node, is_read = np.arange(size), np.arange(size) < count[:, None]
    is_first = (node == 0) & is_read
    _require("tree.parents", parents, ~is_first | (parents == -1), "-1, as node 0 has no parent")
    is_inner = is_read & ~is_first
    _require("tree.parents", parents, ~is_inner | ((parents >= 0) & (parents < node)), "the index of an earlier node")
    above = np.where(is_inner, parents, 0)
    expected = np.where(is_first, 0, np.take_along_axis(depth, above, axis=1) + 1)
    _require("tree.depth", depth, ~is_read | (depth == expected), "the depth of its parent plus 1, or 0 of node 0")
    is_valid = (tokens >= np.where(is_first, 0, -1)) & (tokens < vocab_size)
    _require("tree.tokens", tokens, ~is_read | is_valid, f"in [0, V = {vocab_size}), or -1 after node 0")
    exists = is_read.copy()
    for n in range(1, size):
        exists[:, n] &= (tokens[:, n] >= 0) & np.take_along_axis(exists, above[:, n : n + 1], axis=1)[:, 0]
    _validate_categorical("target", target, exists)
    if tree.distribution is None:
        return
    is_sibling = (above[:, :, None] == above[:, None]) & is_inner[:, None] & (node < node[:, None])
    follows_none = np.any(is_sibling & (tokens < 0)[:, None], axis=2)
    _require("tree.tokens", tokens, ~exists | is_first | ~follows_none, "-1 after a sibling that is -1")
    is_repeated = np.any(is_sibling & (tokens[:, :, None] == tokens[:, None]), axis=2)
    is_drawn = exists & ~is_first
    _require("tree.tokens", tokens, ~is_drawn | ~is_repeated, "another token than its earlier siblings")
    if tree.distribution.temperature is not None:
        is_drawn &= (np.asarray(tree.distribution.temperature) != 0)[:, None]
    of_parents = jax.tree.map(np.asarray, take(tree.distribution, jnp.asarray(above)))
    _validate_categorical("tree.distribution", of_parents, is_drawn, tokens)


def _validate_tokens(draft: Draft, vocab_size: int, strict: bool) -> np.ndarray:
    """Raise ValueError for wrong ids or numbers of drafts; return which ids [B, K] are drafts."""
    tokens = np.asarray(draft.tokens)
    batch_size, num_draft_tokens = tokens.shape
    num_tokens = np.full(batch_size, num_draft_tokens) if draft.num_tokens is None else np.asarray(draft.num_tokens)
    is_valid = (num_tokens >= 0) & (num_tokens <= num_draft_tokens)
    _require("draft.num_tokens", num_tokens, is_valid, f"in [0, K = {num_draft_tokens}]")
    is_unread = np.arange(num_draft_tokens) >= num_tokens[:, None]
    is_exempt = is_unread & (not strict)
    is_valid = is_exempt | ((tokens >= -1) & (tokens < vocab_size))
    _require("draft.tokens", tokens, is_valid, f"-1 or in [0, V = {vocab_size})")
    is_before_end = np.logical_and.accumulate(tokens >= 0, axis=1)
    _require("draft.tokens", tokens, is_exempt | is_before_end | (tokens == -1), "-1 after a -1")
    return is_before_end & ~is_unread


def _validate_numbers(name: str, distribution: Categorical) -> None:
    """Raise ValueError for NaN and +inf in any row, whether it is read or not."""
    for field in ("logits", "min_logit", "log_normalizer"):
        values = getattr(distribution, field)
        if values is not None:
            _require(f"{name}.{field}", values, values < np.inf, "finite or -inf")


def _validate_categorical(
    name: str, distribution: Categorical, is_read: np.ndarray, tokens: ArrayLike | None = None
) -> None:
    """Raise ValueError for wrong parameters, or wrong values in the rows where `is_read` [B, T] is true.

    The tokens [B, T], if given, must have been drawn from these rows.
    """
    logits, temperature, min_logit, log_normalizer, rows, _ = distribution
    temperature = np.ones(is_read.shape[:1]) if temperature is None else np.asarray(temperature)
    is_valid = np.isfinite(temperature) & (temperature >= 0)
    _require(f"{name}.temperature", temperature, is_valid, "finite and >= 0")
    if rows is not None:
        _require(f"{name}.rows", rows, (rows >= 0) & (rows < len(logits)), f"in [0, R = {len(logits)})")
        spread = np.broadcast_to(temperature[:, None], rows.shape)
        stored = np.empty(len(logits), temperature.dtype)
        stored[rows] = spread
        _require(f"{name}.rows", rows, stored[rows] == spread, "a row that sequences of one temperature read")

    for b, t in np.argwhere(is_read).tolist():
        at = (b, t) if rows is None else (int(rows[b, t]),)
        row = logits[at].astype(np.float64)
        _require(f"{name}.logits", row, np.isfinite(row) | (row == -np.inf), "finite or -inf", at)
        _require(f"{name}.logits", row.max(), row.max() > -np.inf, "more than -inf for some token", at)
        if min_logit is not None:
            cut = min_logit[at]
            _require(f"{name}.min_logit", cut, cut <= row.max(), f"at most the greatest logit, {row.max()}", at)
            row = np.where(row >= cut, row, -np.inf)
        if tokens is not None:
            token = np.asarray(tokens)[b, t]
            owner = name.partition(".")[0]
            _require(f"{owner}.tokens", token, row[token] > -np.inf, f"of positive probability under {name}", (b, t))
        if log_normalizer is not None and temperature[b] > 0:
            expected = np.logaddexp.reduce(row / temperature[b])
            is_valid = abs(log_normalizer[at] - expected) <= TOLERANCE * max(1, abs(expected) / 100)
            _require(f"{name}.log_normalizer", log_normalizer[at], is_valid, f"{expected:.6g}, as its logits say", at)


def _require(name: str, values: ArrayLike, is_valid: ArrayLike, expected: str, at: tuple[int, ...] = ()) -> None:
    if not np.all(is_valid):
        index = tuple(np.argwhere(np.logical_not(is_valid))[0].tolist())
        raise ValueError(f"{name}{[*at, *index]} must be {expected}, got {np.asarray(values)[index]}")
