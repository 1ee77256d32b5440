"""Verification of packed batches, as servers hold them: one array with the rows of one sequence after another.

The rows are not copied; `Categorical.rows` says which rows belong to each sequence. Shapes: B sequences, K drafts, V
vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.distributions import as_categorical
from specjax.types import Array, Categorical, Draft, Verified, Verifier
from specjax.validation import check_array, holds_booleans, is_integer, is_traced

__all__ = ["Packed", "expand_to_tokens", "pack", "parse_output", "verify"]


_NO_LISTS = str | bytes | bytearray | Mapping | Set  # their elements have no order, or would pass for token ids


class Packed(NamedTuple):
    """The drafts of a batch on the host, one sequence after another."""

    draft_tokens: np.ndarray  # [num_tokens] int32
    cu_num_draft_tokens: np.ndarray  # [B] int32, cumulative number of drafts, each sequence included
    target_rows: np.ndarray  # [num_tokens] int32, the target row that verifies each draft
    bonus_rows: np.ndarray  # [B] int32, the target row of each sequence's bonus token
    max_draft_tokens: int  # the largest number of drafts of a sequence


def pack(drafts: Sequence[Sequence[int]]) -> Packed:
    """Pack the draft tokens of a batch.

    Args:
        drafts: the draft token ids of each sequence, which may have none.

    Returns:
        Packed, NumPy arrays.

    Raises:
        ValueError: drafts are no lists of token ids, integers that int32 holds.

    Example:
        >>> packed = pack([[5, 6], [], [7]])
        >>> packed.draft_tokens, packed.cu_num_draft_tokens
        (array([5, 6, 7], dtype=int32), array([2, 2, 3], dtype=int32))
        >>> packed.target_rows, packed.bonus_rows
        (array([0, 1, 4], dtype=int32), array([2, 3, 5], dtype=int32))
    """
    if not isinstance(drafts, Iterable) or isinstance(drafts, _NO_LISTS):
        raise ValueError(f"drafts must be a list of lists of token ids, got {drafts!r}")
    ids = [_as_ids(f"drafts[{i}]", tokens) for i, tokens in enumerate(drafts)]
    counts = [len(tokens) for tokens in ids]
    cumulative = np.cumsum(counts, dtype=np.int32)
    sequence = np.arange(len(counts), dtype=np.int32)
    return Packed(
        draft_tokens=np.concatenate([np.zeros(0, np.int32), *ids]),
        cu_num_draft_tokens=cumulative,
        target_rows=np.arange(sum(counts), dtype=np.int32) + np.repeat(sequence, counts),
        bonus_rows=cumulative + sequence,
        max_draft_tokens=max(counts, default=0),
    )


def _as_ids(name: str, tokens: Any) -> np.ndarray:
    """Return token ids as an array [num_tokens] int32; raise ValueError where they are none."""
    is_list = isinstance(tokens, Iterable) and not isinstance(tokens, _NO_LISTS) and not holds_booleans(tokens)
    try:
        ids = np.array(tokens) if is_list else np.array(None)
    except ValueError:  # lists of several lengths
        ids = np.array(None)
    if ids.shape == (0,):
        return np.zeros(0, np.int32)
    limits = np.iinfo(np.int32)
    are_integers = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    if not are_integers or ids.min() < limits.min or ids.max() > limits.max:
        raise ValueError(f"{name} must be a list of integers that int32 holds, got {tokens!r}")
    return ids.astype(np.int32)


def verify(
    verifier: Verifier,
    keys: Array,
    draft_tokens: Array,
    cu_num_draft_tokens: Array,
    draft_distribution: Categorical | Array | None,
    target: Categorical | Array,
    *,
    max_draft_tokens: int,
    **options: Any,
) -> Verified:
    """Verify a packed batch with any verifier, which emits the same tokens as for the padded batch with the same keys.

    No logits are copied. The packed arrays may be longer than the drafts, so that their shapes can be static; entries
    after the drafts are not read.

    Args:
        verifier: a verifier of `specjax.verifiers`, or your own.
        keys: typed threefry keys [], [B] or [B, K+1], as the verifier takes them.
        draft_tokens: [num_tokens] int32, the drafts of one sequence after another.
        cu_num_draft_tokens: [B] int32, the cumulative number of drafts, each sequence included.
        draft_distribution: the distribution of each draft, a Categorical without `rows` or its logits [num_tokens, V];
            its temperature is [B], its min_logit and log_normalizer are [num_tokens]. None: the drafts are
            deterministic.
        target: the distribution of each next token, a Categorical without `rows` or its logits [num_tokens + B, V]:
            for each sequence one row per draft, then the row of its bonus token. Its temperature is [B], its min_logit
            and log_normalizer are [num_tokens + B].
        max_draft_tokens: K, static. Under jit, where the counts cannot be checked, sequences with more drafts are cut
            to K.
        **options: the verifier's options.

    Returns:
        Verified, with tokens [B, K+1].

    Raises:
        ValueError: an array has a wrong shape or dtype, or the counts decrease, exceed K or add up to more than
            num_tokens; and the errors of the verifier.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import ragged, verifiers
        >>> packed = ragged.pack([[1, 1], [], [0]])
        >>> logits = 100.0 * jax.nn.one_hot(jnp.array([1, 0, 1, 1, 0, 1]), 2)
        >>> tokens, counts = packed.draft_tokens, packed.cu_num_draft_tokens
        >>> ragged.verify(
        ...     verifiers.rejection, jax.random.key(0), tokens, counts, None, logits, max_draft_tokens=2
        ... ).tokens
        Array([[ 1,  0, -1],
               [ 1, -1, -1],
               [ 0,  1, -1]], dtype=int32)
    """
    tokens, counts = _checked_tokens(draft_tokens, cu_num_draft_tokens, max_draft_tokens)
    target = as_categorical(target)
    _check_packed("target", target, "[num_tokens + B, V]", (tokens.shape[0] + counts.shape[0], None))
    rows = _rows(counts, tokens.shape[0], max_draft_tokens)
    if draft_distribution is not None:
        draft_distribution = _unpacked(as_categorical(draft_distribution), rows, tokens, counts, target)
    padded = jnp.where(rows.is_draft, jnp.pad(tokens, (0, 1))[rows.draft], -1)
    draft = Draft(padded, draft_distribution, rows.num_drafts)
    return verifier(keys, draft, target._replace(rows=rows.target), **options)


def _checked_tokens(draft_tokens: Array, cu_num_draft_tokens: Array, max_draft_tokens: int) -> tuple[Array, Array]:
    """Return the tokens [num_tokens] and the cumulative counts [B] in int32, after the checks."""
    tokens = _as_array("draft_tokens", draft_tokens)
    counts = _as_array("cu_num_draft_tokens", cu_num_draft_tokens)
    check_array("draft_tokens", tokens, "[num_tokens]", (None,), jnp.integer)
    check_array("cu_num_draft_tokens", counts, "[B]", (None,), jnp.integer)
    if not (is_integer(max_draft_tokens) and max_draft_tokens >= 0):
        raise ValueError(f"max_draft_tokens must be an integer >= 0, got {max_draft_tokens!r}")
    if not is_traced(counts):
        _check_counts(np.asarray(counts), tokens.shape[0], max_draft_tokens)
    return tokens.astype(jnp.int32), counts.astype(jnp.int32)


class _Rows(NamedTuple):
    """Where the rows of each sequence lie in the packed arrays.

    A sequence without drafts has no draft row, so its index points at another sequence's, which it does not read.
    """

    num_drafts: Array  # [B] int32, at most K
    is_draft: Array  # [B, K] bool
    first: Array  # [B] int32, the row of the first draft
    draft: Array  # [B, K] int32, the row of each draft; past the drafts, the row of the last one
    target: Array  # [B, K+1] int32, the row that verifies each draft, then the row of the bonus token


def _rows(counts: Array, num_tokens: int, max_draft_tokens: int) -> _Rows:
    """Compute the rows from the cumulative counts [B]."""
    batch_size = counts.shape[0]
    num_drafts = jnp.diff(counts, prepend=0)[:, None]
    start = counts[:, None] - num_drafts
    index = jnp.arange(max_draft_tokens + 1, dtype=jnp.int32)[None]
    target_rows = start + jnp.arange(batch_size, dtype=jnp.int32)[:, None] + jnp.minimum(index, num_drafts)
    index = index[:, :max_draft_tokens]
    first = jnp.minimum(start, max(num_tokens, 1) - 1)
    return _Rows(
        num_drafts=jnp.minimum(num_drafts[:, 0], max_draft_tokens),
        is_draft=index < num_drafts,
        first=first[:, 0],
        draft=first + jnp.clip(num_drafts - 1, 0, index),
        target=target_rows,
    )


def _unpacked(packed: Categorical, rows: _Rows, tokens: Array, counts: Array, target: Categorical) -> Categorical:
    """Return the packed distribution of the drafts with its rows, and with the temperature of each sequence."""
    num_tokens, batch_size = tokens.shape[0], counts.shape[0]
    _check_packed("draft_distribution", packed, "[num_tokens, V]", (num_tokens, target.logits.shape[1]))
    temperature = packed.temperature
    if temperature is not None and batch_size:
        # Sequences that point at the same row must have the same temperature: the temperature of the row's own
        # sequence.
        check_array("draft_distribution.temperature", temperature, "[B]", (batch_size,), jnp.floating)
        temperature = expand_to_tokens(temperature, counts, max(num_tokens, 1))[rows.first]
    if num_tokens == 0:
        packed = Categorical(target.logits)  # the rows must point at something
    return packed._replace(temperature=temperature, rows=rows.draft)


def expand_to_tokens(values: Array, cu_num_tokens: Array, num_tokens: int | None = None) -> Array:
    """Repeat the value of each sequence for each of its tokens.

    Args:
        values: [B], any dtype.
        cu_num_tokens: [B] int32, the cumulative number of tokens, each sequence included.
        num_tokens: the length of the result, static. None takes the last count, which must not be traced then. The
            entries past the last token repeat the last value.

    Returns:
        [num_tokens], of the dtype of `values`.

    Raises:
        ValueError: an array has a wrong shape or dtype; the counts decrease; or `num_tokens` is no integer >= 0, is
            above 0 without sequences, or is not given with traced counts.

    Example:
        >>> import jax.numpy as jnp
        >>> expand_to_tokens(jnp.array([7, 8, 9]), jnp.array([2, 5, 6]), 6)
        Array([7, 7, 8, 8, 8, 9], dtype=int32)
    """
    values, counts = _as_array("values", values), _as_array("cu_num_tokens", cu_num_tokens)
    check_array("cu_num_tokens", counts, "[B]", (None,), jnp.integer)
    check_array("values", values, "[B]", counts.shape, np.generic)
    if not is_traced(counts) and np.any(np.diff(np.asarray(counts), prepend=0) < 0):
        raise ValueError(f"cu_num_tokens must be non-decreasing, from 0 on, got {np.asarray(counts).tolist()}")
    if num_tokens is None:
        if is_traced(counts):
            raise ValueError("num_tokens must be an integer where cu_num_tokens is traced, got None")
        num_tokens = int(counts[-1]) if counts.size else 0
    most = "" if counts.size else ", and 0 without sequences"
    if not (is_integer(num_tokens) and num_tokens >= 0 and (counts.size or not num_tokens)):
        raise ValueError(f"num_tokens must be an integer >= 0{most}, got {num_tokens!r}")
    return values[jnp.searchsorted(counts, jnp.arange(num_tokens, dtype=counts.dtype), side="right")]


def parse_output(tokens: Array, vocab_size: int) -> list[list[int]]:
    """Return the emitted tokens of each sequence, without padding and without ids outside the vocabulary.

    Args:
        tokens: [B, K+1] int32, `Verified.tokens`.
        vocab_size: V. Larger ids, which a model whose head is padded can emit, are dropped.

    Returns:
        A list of token ids for each sequence.

    Raises:
        ValueError: `tokens` is no array [B, K+1] of integers, or `vocab_size` is no integer >= 1.

    Example:
        >>> import numpy as np
        >>> parse_output(np.array([[5, 3, -1], [2, 7, 9]]), vocab_size=8)
        [[5, 3], [2, 7]]
    """
    try:
        ids: Any = np.asarray(tokens)
    except ValueError:
        raise ValueError(f"tokens must have shape [B, K+1], got lists of several lengths, {tokens!r}") from None
    check_array("tokens", ids, "[B, K+1]", (None, None), jnp.integer)
    if not (is_integer(vocab_size) and vocab_size >= 1):
        raise ValueError(f"vocab_size must be an integer >= 1, got {vocab_size!r}")
    return [row[(row >= 0) & (row < vocab_size)].tolist() for row in ids]


def _as_array(name: str, value: Any) -> Array:
    """Return an argument as an array; raise ValueError where it cannot be one, as text."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an array of numbers, got {value!r}") from None


def _check_packed(name: str, distribution: Categorical, axes: str, shape: tuple[int | None, ...]) -> None:
    if distribution.rows is not None:
        raise ValueError(f"{name}.rows must be None: it is built here, got shape {jnp.shape(distribution.rows)}")
    check_array(f"{name}.logits", distribution.logits, axes, shape, jnp.floating)


def _check_counts(counts: np.ndarray, num_tokens: int, max_draft_tokens: int) -> None:
    num_drafts = np.diff(counts, prepend=0)
    if np.any(num_drafts < 0) or np.any(counts > num_tokens):
        expected = f"non-decreasing and at most num_tokens = {num_tokens}"
        raise ValueError(f"cu_num_draft_tokens must be {expected}, got {counts.tolist()}")
    if np.any(num_drafts > max_draft_tokens):
        got = f"{num_drafts.max()} of sequence {num_drafts.argmax()}"
        raise ValueError(f"drafts must be at most max_draft_tokens = {max_draft_tokens} long, got {got}")
