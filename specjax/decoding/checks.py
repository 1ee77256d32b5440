"""Checks of the arguments of the decoding loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import Sampling
from specjax.types import Array, Model, Proposer
from specjax.validation import holds_booleans, is_integer, is_traced


def as_integers(name: str, given: Any, shape: str) -> Array:
    """Return an argument as an array; raise ValueError where it cannot be one, as lists of several lengths."""
    if holds_booleans(given):
        raise ValueError(f"{name} must be int32 {shape}, got {given!r}")
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError):
        kind = "lists of several lengths" if isinstance(given, list | tuple) else repr(given)
        raise ValueError(f"{name} must be int32 {shape}, got {kind}") from None


def check_request(
    model: Model,
    prompts: Array,
    lengths: Array,
    sampling: Sampling,
    *,
    rows: Array | None,
    max_length: int,
    chunk_size: int | None,
    num_logprobs: int | None,
    prompt_logprobs: bool,
) -> int:
    """Return the number of rows B that the arguments of `prefill` describe; raise ValueError where they disagree."""
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(f"prompts must be int32 [B, W], got {prompts.dtype} {prompts.shape}")
    num_prompts, width = prompts.shape
    if lengths.shape != (num_prompts,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be int32 of shape [B] = ({num_prompts},), got {lengths.dtype} {lengths.shape}")
    if not is_integer(max_length):
        raise ValueError(f"max_length must be an integer, got {max_length!r}")
    if not (num_logprobs is None or (is_integer(num_logprobs) and 0 <= num_logprobs <= model.vocab_size)):
        raise ValueError(
            f"num_logprobs must be None or an integer in [0, V = {model.vocab_size}], got {num_logprobs!r}"
        )
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling, as sampling.batch returns, got {type(sampling).__name__}")
    if not 1 <= width <= max_length:
        raise ValueError(f"prompts must have a width in [1, max_length = {max_length}], got {width}")
    if model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the model's {model.max_length}, got {max_length}")
    if prompt_logprobs and num_logprobs is None:
        raise ValueError("prompt_logprobs must be False where num_logprobs is None, got True")
    _check_prompts(prompts, lengths, model.vocab_size)
    _check_token_ids(sampling, model.vocab_size)
    batch_size = num_prompts if rows is None else _check_rows(rows, num_prompts)
    if sampling.max_tokens.shape != (batch_size,):
        raise ValueError(f"sampling must have {batch_size} rows, got max_tokens of shape {sampling.max_tokens.shape}")
    if not (chunk_size is None or (is_integer(chunk_size) and chunk_size >= 1)):
        raise ValueError(f"chunk_size must be None or an integer >= 1, got {chunk_size!r}")
    return batch_size


def _check_rows(rows: Array, num_prompts: int) -> int:
    """Return the number of rows; raise ValueError where one is not the index of a prompt."""
    if jnp.ndim(rows) != 1 or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        raise ValueError(f"rows must be int32 [B], got {jnp.result_type(rows)} {jnp.shape(rows)}")
    if not is_traced(rows) and not np.all((np.asarray(rows) >= 0) & (np.asarray(rows) < num_prompts)):
        raise ValueError(f"rows must be in [0, {num_prompts}), the number of prompts, got {np.asarray(rows).tolist()}")
    return len(rows)


def _check_prompts(prompts: Array, lengths: Array, vocab_size: int) -> None:
    """Raise ValueError for lengths or token ids out of range. Under jit they have no values, so nothing is checked."""
    if is_traced(prompts, lengths):
        return
    values, sizes = np.asarray(prompts), np.asarray(lengths)
    width = values.shape[1]
    if not ((sizes >= 1) & (sizes <= width)).all():
        raise ValueError(f"lengths must be in [1, W = {width}], got {sizes.tolist()}")
    ids = values[np.arange(width) < sizes[:, None]]
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"prompts must have token ids in [0, {vocab_size}), got {ids.min()} to {ids.max()}")


def _check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for token ids of the parameters outside the vocabulary, where they have values."""
    for name in ("stop_tokens", "bias_tokens", "allowed_tokens", "bad_words"):
        ids = getattr(sampling, name)
        if ids is not None and not is_traced(ids) and (largest := np.max(ids, initial=-1)) >= vocab_size:
            raise ValueError(f"sampling.{name} must have token ids in [0, {vocab_size}), got {largest}")


def check_num_draft_tokens(proposer: Proposer, most: int) -> None:
    """Raise ValueError where a proposer makes more draft tokens than the state of a loop counts."""
    if proposer.num_draft_tokens > most:
        raise ValueError(
            f"proposer must be the one that the state was made with, with at most its {most} draft tokens, got "
            f"{proposer.num_draft_tokens}"
        )


def step_limit(max_steps: int | Array | None) -> Array:
    """Return the limit of steps [] int32. The value of an array, which may be traced, is not read."""
    most = jnp.iinfo(jnp.int32).max
    if max_steps is None:
        return jnp.int32(most)
    if isinstance(max_steps, jax.Array | np.ndarray):
        is_valid = max_steps.shape == () and jnp.issubdtype(max_steps.dtype, jnp.integer)
    else:
        is_valid = is_integer(max_steps) and 0 <= max_steps <= most
    if not is_valid:
        raise ValueError(f"max_steps must be None or an integer in [0, {most}], got {max_steps!r}")
    return jnp.asarray(max_steps, jnp.int32)
