"""Verification of packed batches, as servers hold them: the rows of all sequences in one array, one after the other.

The rows stay where they are; each sequence is told which are its own. Shapes: B sequences, K drafts, V vocabulary.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.distributions import as_categorical
from specjax.types import Array, Categorical, Draft, Verified, Verifier, is_integer
from specjax.verifiers import core as common

__all__ = ["Packed", "expand_to_tokens", "pack", "parse_output", "verify"]


class Packed(NamedTuple):
    """The drafts of a batch, one sequence after the other, on the host."""

    draft_tokens: np.ndarray  # [num_tokens] int32
    cu_num_draft_tokens: np.ndarray  # [B] int32, drafts up to and including those of each sequence
    target_rows: np.ndarray  # [num_tokens] int32, the row of the target that judges each draft
    bonus_rows: np.ndarray  # [B] int32, the row of the target after all drafts of each sequence
    max_draft_tokens: int  # the most drafts of a sequence


def pack(drafts: Sequence[Sequence[int]]) -> Packed:
    """Pack the draft tokens of a batch.

    Args:
        drafts: the draft token ids of each sequence; may be empty.

    Returns:
        Packed.

    Example:
        >>> packed = pack([[5, 6], [], [7]])
        >>> packed.draft_tokens, packed.cu_num_draft_tokens
        (array([5, 6, 7], dtype=int32), array([2, 2, 3], dtype=int32))
        >>> packed.target_rows, packed.bonus_rows
        (array([0, 1, 4], dtype=int32), array([2, 3, 5], dtype=int32))
    """
    counts = [len(tokens) for tokens in drafts]
    cumulative = np.cumsum(counts, dtype=np.int32)
    sequence = np.arange(len(counts), dtype=np.int32)
    return Packed(
        draft_tokens=np.fromiter(chain.from_iterable(drafts), np.int32),
        cu_num_draft_tokens=cumulative,
        target_rows=np.arange(sum(counts), dtype=np.int32) + np.repeat(sequence, counts),
        bonus_rows=cumulative + sequence,
        max_draft_tokens=max(counts, default=0),
    )


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
    """Verify a packed batch with any verifier. Emits what the verifier emits for the padded batch with the same keys.

    No logits are copied. For static shapes the packed arrays may be longer than the drafts, with anything at the end.

    Args:
        verifier: one of `specjax.verifiers`, or your own.
        keys: typed threefry keys [], [B] or [B, K+1], as the verifier takes them.
        draft_tokens: [num_tokens] int32, the drafts of all sequences, one sequence after the other.
        cu_num_draft_tokens: [B] int32, how many drafts there are up to and including those of each sequence.
        draft_distribution: the packed law of each draft, logits [num_tokens, V], without `rows`; temperature is [B],
            min_logit and log_normalizer are [num_tokens]. None: deterministic drafts.
        target: the packed law of each token, logits [num_tokens + B, V]: for every sequence one row a draft, then the
            row of its bonus token. Temperature is [B], min_logit and log_normalizer are [num_tokens + B].
        max_draft_tokens: K, static. Under jit, where counts cannot be checked, longer drafts are cut to it.
        **options: of the verifier.

    Returns:
        Verified, with tokens [B, K+1].

    Raises:
        ValueError: for wrong shapes or dtypes, or counts that decrease, exceed K, or add up to more than num_tokens;
            and what the verifier raises.

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
    draft_tokens, counts, target = jnp.asarray(draft_tokens), jnp.asarray(cu_num_draft_tokens), as_categorical(target)
    common.check_array("draft_tokens", draft_tokens, "[num_tokens]", (None,), jnp.integer)
    common.check_array("cu_num_draft_tokens", counts, "[B]", (None,), jnp.integer)
    num_tokens, batch_size = draft_tokens.shape[0], counts.shape[0]
    if not (is_integer(max_draft_tokens) and max_draft_tokens >= 0):
        raise ValueError(f"max_draft_tokens must be an integer >= 0, got {max_draft_tokens!r}")
    _check_packed("target", target, "[num_tokens + B, V]", (num_tokens + batch_size, None))
    if not isinstance(counts, jax.core.Tracer):
        _check_counts(np.asarray(counts), num_tokens, max_draft_tokens)

    draft_tokens, counts = draft_tokens.astype(jnp.int32), counts.astype(jnp.int32)
    num_drafts = jnp.diff(counts, prepend=0)[:, None]
    start = counts[:, None] - num_drafts
    index = jnp.arange(max_draft_tokens + 1, dtype=jnp.int32)[None]
    target_rows = start + jnp.arange(batch_size, dtype=jnp.int32)[:, None] + jnp.minimum(index, num_drafts)
    # A sequence without drafts has no draft row of its own: it points at a neighbour's, which it does not read.
    index = index[:, :max_draft_tokens]
    first = jnp.minimum(start, max(num_tokens, 1) - 1)
    draft_rows = first + jnp.clip(num_drafts - 1, 0, index)
    tokens = jnp.where(index < num_drafts, jnp.pad(draft_tokens, (0, 1))[draft_rows], -1)

    if draft_distribution is not None:
        draft_distribution = as_categorical(draft_distribution)
        shape = (num_tokens, target.logits.shape[1])
        _check_packed("draft_distribution", draft_distribution, "[num_tokens, V]", shape)
        temperature = draft_distribution.temperature
        if num_tokens == 0:
            draft_distribution = Categorical(target.logits)
        if temperature is not None and batch_size:
            # All that point at a row agree on its temperature: that of the sequence whose row it is.
            common.check_array("draft_distribution.temperature", temperature, "[B]", (batch_size,), jnp.floating)
            temperature = expand_to_tokens(temperature, counts, max(num_tokens, 1))[first[:, 0]]
        draft_distribution = draft_distribution._replace(temperature=temperature, rows=draft_rows)
    draft = Draft(tokens, draft_distribution, jnp.minimum(num_drafts[:, 0], max_draft_tokens))
    return verifier(keys, draft, target._replace(rows=target_rows), **options)


def expand_to_tokens(values: Array, cu_num_tokens: Array, num_tokens: int | None = None) -> Array:
    """Repeat the value of each sequence for each of its tokens.

    Args:
        values: [B], any dtype.
        cu_num_tokens: [B] int32, how many tokens there are up to and including those of each sequence.
        num_tokens: length of the result, static; None reads it from the last count, which must then be concrete. Past
            the last token it holds the last value.

    Returns:
        [num_tokens], of the dtype of `values`.

    Raises:
        ValueError: for wrong shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> expand_to_tokens(jnp.array([7, 8, 9]), jnp.array([2, 5, 6]), 6)
        Array([7, 7, 8, 8, 8, 9], dtype=int32)
    """
    values, counts = jnp.asarray(values), jnp.asarray(cu_num_tokens)
    common.check_array("cu_num_tokens", counts, "[B]", (None,), jnp.integer)
    common.check_array("values", values, "[B]", counts.shape, np.generic)
    if num_tokens is None:
        num_tokens = int(counts[-1]) if counts.size else 0
    return values[jnp.searchsorted(counts, jnp.arange(num_tokens, dtype=counts.dtype), side="right")]


def parse_output(tokens: Array, vocab_size: int) -> list[list[int]]:
    """Read what a verifier emitted: the tokens of each sequence, without padding and ids outside the vocabulary.

    Args:
        tokens: [B, K+1] int32, `Verified.tokens`.
        vocab_size: V; ids from here on are dropped, as a padded head of the model may give.

    Returns:
        A list of token ids for each sequence.

    Example:
        >>> import numpy as np
        >>> parse_output(np.array([[5, 3, -1], [2, 7, 9]]), vocab_size=8)
        [[5, 3], [2, 7]]
    """
    return [row[(row >= 0) & (row < vocab_size)].tolist() for row in np.asarray(tokens)]


def _check_packed(name: str, distribution: Categorical, axes: str, shape: tuple[int | None, ...]) -> None:
    if distribution.rows is not None:
        raise ValueError(f"{name}.rows must be None: it is built here, got shape {jnp.shape(distribution.rows)}")
    common.check_array(f"{name}.logits", distribution.logits, axes, shape, jnp.floating)


def _check_counts(counts: np.ndarray, num_tokens: int, max_draft_tokens: int) -> None:
    num_drafts = np.diff(counts, prepend=0)
    if np.any(num_drafts < 0) or np.any(counts > num_tokens):
        expected = f"non-decreasing and at most num_tokens = {num_tokens}"
        raise ValueError(f"cu_num_draft_tokens must be {expected}, got {counts.tolist()}")
    if np.any(num_drafts > max_draft_tokens):
        got = f"{num_drafts.max()} of sequence {num_drafts.argmax()}"
        raise ValueError(f"drafts must be at most max_draft_tokens = {max_draft_tokens} long, got {got}")
