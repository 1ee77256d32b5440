"""The sampling parameters of a batch, as arrays with one row for each request."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax.sampling import guided
from specjax.sampling.guided.tables import Guide, round_up
from specjax.sampling.params import LogitsProcessor, SamplingParams
from specjax.types import Array


class Sampling(NamedTuple):
    """The sampling parameters of a batch. A field is None if no row uses it, and then costs nothing.

    The sizes N, W and M of lists are powers of two, so that programs are compiled for few sizes.
    """

    max_tokens: Array  # [B] int32
    temperature: Array | None = None  # [B] float32; None is 1
    top_k: Array | None = None  # [B] int32; -1 keeps all tokens
    top_p: Array | None = None  # [B] float32
    min_p: Array | None = None  # [B] float32
    stop_tokens: Array | None = None  # [B, N] int32, padded with -1
    min_tokens: Array | None = None  # [B] int32
    presence_penalty: Array | None = None  # [B] float32
    frequency_penalty: Array | None = None  # [B] float32
    repetition_penalty: Array | None = None  # [B] float32
    bias_tokens: Array | None = None  # [B, N] int32, padded with -1
    bias_values: Array | None = None  # [B, N] float32
    allowed_tokens: Array | None = None  # [B, N] int32, padded with -1; a row without ids allows all
    bad_words: Array | None = None  # [B, W, M] int32, each word padded with -1 in front
    logits_processors: tuple[tuple[Partial, Array], ...] | None = None  # functions, and the rows [B] bool that use each
    guide: Guide | None = None  # the grammars


def batch(
    params: Sequence[SamplingParams],
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> Sampling:
    """Return the sampling parameters of several requests as arrays of a batch.

    Args:
        params: the parameters of each row.
        eos_token_ids: the stop tokens of every row that does not ignore them.
        vocab_size: V; None leaves out the check that token ids are smaller than V.
        tokenize: a function that returns the token ids of a text, without special tokens. Bad words that are strings
            need it.

    Returns:
        Sampling, with None for every feature that no row uses.

    Raises:
        ValueError: `params` is one for all rows, a token id is outside the vocabulary, or bad words are
            strings and `tokenize` is None.
    """
    if isinstance(params, SamplingParams):
        raise ValueError("params must be a sequence of SamplingParams, one for each row, got one alone")
    stops = [(*(p.stop_token_ids or ()), *(() if p.ignore_eos else eos_token_ids)) for p in params]
    biases = [p.logit_bias or {} for p in params]
    allowed = [p.allowed_token_ids or () for p in params]
    bad_words = [tokenized(p.bad_words or (), tokenize) for p in params]
    if vocab_size is not None:
        words = [word for row in bad_words for word in row]
        named = {
            "stop_token_ids": stops,
            "logit_bias": [list(bias) for bias in biases],
            "allowed_token_ids": allowed,
            "bad_words": words,
        }
        check_vocabulary(params, named, vocab_size)

    def column(name: str, dtype: type, unused: float) -> Array | None:
        values = [getattr(p, name) for p in params]
        return None if all(v == unused for v in values) else jnp.asarray(values, dtype)

    stop_tokens = _padded(stops)
    return Sampling(
        max_tokens=jnp.asarray([p.max_tokens for p in params], jnp.int32),
        temperature=jnp.asarray([p.temperature for p in params], jnp.float32),
        top_k=column("top_k", jnp.int32, -1),
        top_p=column("top_p", jnp.float32, 1),
        min_p=column("min_p", jnp.float32, 0),
        stop_tokens=stop_tokens,
        min_tokens=None if stop_tokens is None else column("min_tokens", jnp.int32, 0),
        presence_penalty=column("presence_penalty", jnp.float32, 0),
        frequency_penalty=column("frequency_penalty", jnp.float32, 0),
        repetition_penalty=column("repetition_penalty", jnp.float32, 1),
        bias_tokens=_padded([list(bias) for bias in biases]),
        bias_values=_padded([list(bias.values()) for bias in biases], 0, jnp.float32),
        allowed_tokens=_padded(allowed),
        bad_words=_padded_words(bad_words),
        logits_processors=_shared_processors([p.logits_processors or () for p in params]),
        guide=guided.batch([_grammar(p) for p in params], vocab_size),
    )


def _grammar(params: SamplingParams) -> guided.Grammar | None:
    grammar = params.guided_decoding
    if grammar is not None and not isinstance(grammar, guided.Grammar):
        raise ValueError(f"guided_decoding must be compiled for a batch: a Grammar, got {grammar!r}")
    return grammar


def check_vocabulary(
    params: Sequence[SamplingParams], named_ids: dict[str, Sequence[Sequence[int]]], vocab_size: int
) -> None:
    """Raise ValueError for token ids, or numbers of log-probabilities, that the vocabulary does not have."""
    for name, rows in named_ids.items():
        for ids in rows:
            if any(token >= vocab_size for token in ids):
                raise ValueError(f"{name} must be in [0, vocab_size = {vocab_size}), got {ids}")
    for name in ("logprobs", "prompt_logprobs"):
        most = max((getattr(p, name) or 0 for p in params), default=0)
        if most > vocab_size:
            raise ValueError(f"{name} must be at most vocab_size = {vocab_size}, got {most}")


def tokenized(
    words: Sequence[str | Sequence[int]], tokenize: Callable[[str], Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """Return the token sequences of bad words; a string has one at the start of a text and one after a space."""
    sequences = []
    for word in words:
        if not isinstance(word, str):
            sequences.append(tuple(word))
            continue
        if tokenize is None:
            raise ValueError(f"bad_words must be sequences of token ids where batch has no tokenize, got {word!r}")
        bare = word.lstrip()
        sequences += [tuple(tokenize(text)) for text in ((bare, " " + bare) if bare else (word,))]
        if () in sequences:
            raise ValueError(f"bad_words must have tokens, got {word!r}, which has none")
    return list(dict.fromkeys(sequences))


def _shared_processors(rows: Sequence[Sequence[LogitsProcessor]]) -> tuple[tuple[Partial, Array], ...] | None:
    """Return every logits processor with the rows [B] bool that use it, in an order that keeps the order of each row.

    A function stands at the place that it has in the rows, and once for each of its places.
    """
    entries = sorted(dict.fromkeys(entry for row in rows for entry in enumerate(row)), key=lambda entry: entry[0])
    if not entries:
        return None
    return tuple(
        (
            function if isinstance(function, Partial) else Partial(function),
            jnp.asarray([row[i : i + 1] == (function,) for row in rows]),
        )
        for i, function in entries
    )


def _padded(rows: Sequence[Sequence[float]], fill: float = -1, dtype: type = jnp.int32) -> Array | None:
    """Return rows of different lengths as an array [B, N], or None if all are empty."""
    width = max(map(len, rows), default=0)
    if not width:
        return None
    width = round_up(width)
    return jnp.asarray([[*row, *[fill] * (width - len(row))] for row in rows], dtype)


def _padded_words(rows: Sequence[Sequence[tuple[int, ...]]]) -> Array | None:
    """Return the token sequences of each row as an array [B, W, M], padded in front, or None if there are none."""
    num_words = max(map(len, rows), default=0)
    if not num_words:
        return None
    size = round_up(max(len(word) for words in rows for word in words))
    array = np.full((len(rows), round_up(num_words), size), -1, np.int32)
    for i, words in enumerate(rows):
        for j, word in enumerate(words):
            array[i, j, size - len(word) :] = word
    return jnp.asarray(array)
