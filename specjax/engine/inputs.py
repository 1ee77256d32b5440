"""Input of a request for the device: token ids of its prompt, and the key of its noise."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.sampling import SamplingParams
from specjax.validation import holds_booleans, is_integer, is_iterable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_eos_token_ids(eos_token_ids: Any, vocab_size: int) -> None:
    """Raise ValueError unless the end-of-sequence tokens are ids of a vocabulary."""
    is_list = isinstance(eos_token_ids, Collection) and is_iterable(eos_token_ids)
    is_list = is_list and not isinstance(eos_token_ids, bytes | bytearray | Mapping)
    are_ids = is_list and all(map(is_integer, eos_token_ids))
    if not (are_ids and all(0 <= token < vocab_size for token in eos_token_ids)):
        raise ValueError(f"eos_token_ids must be ids in [0, {vocab_size}), got {eos_token_ids!r}")


def encode_prompt(
    name: str,
    prompt: str | Sequence[int],
    tokenizer: "Tokenizer",
    params: SamplingParams,
    max_length: int,
    vocab_size: int,
) -> list[int]:
    """Return the token ids of a prompt after checks and truncation.

    Args:
        name: name of the prompt in errors.
        prompt: text or token ids.
        tokenizer: the tokenizer of the target.
        params: the parameters of the request, of which `truncate_prompt_tokens` counts.
        max_length: the most tokens of a prompt and its output.
        vocab_size: V.

    Raises:
        ValueError: the prompt is no text or list of token ids, is empty, or leaves no room for a token.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"{prompt[error.start]!r} at {error.start}"
            raise ValueError(f"{name} must be text that UTF-8 can encode, got {got}") from error
        ids = np.array(tokenizer.encode(prompt).ids, np.int64)
    else:
        try:
            ids = np.asarray(prompt)
        except ValueError:  # the prompt is a list of lists of different lengths
            ids = np.empty(())
        is_list = ids.ndim == 1 and not isinstance(prompt, bytearray) and not holds_booleans(prompt)
        if not is_list or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"{name} must be a string or a list of token ids, got {prompt!r}")
    if not len(prompt) or not ids.size:
        raise ValueError(f"{name} must have at least one token, got {prompt!r}")
    ids = ids[-(params.truncate_prompt_tokens or len(ids)) :]
    if len(ids) >= max_length:
        raise ValueError(f"{name} must leave room for one token in max_length = {max_length}, got {len(ids)} tokens")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{name} must have token ids in [0, {vocab_size}), got {outside[0]}")
    return ids.tolist()


def key_data(seed: int | None, entropy: np.random.Generator) -> np.ndarray:
    """Return the data [2] uint32 of a request's key: its seed modulo 2**64, or a fresh one without a seed.

    `jax.random.key` would keep only the lower half of a seed.
    """
    if seed is None:
        seed = int(entropy.integers(2**64, dtype=np.uint64))
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
