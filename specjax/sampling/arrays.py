"""The sampling parameters of a batch, as arrays with one row for each request."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class Rule:
    """A field of `Sampling` that is an array of numbers or of token ids."""

    neutral: float  # the value that changes no distribution and ends nothing
    dtype: type
    capacities: tuple[str, ...] = ()  # the fields of `Capacities` that are the sizes of a row's list; () is a number
    shapes_logits: bool = False  # whether another value changes the logits before the temperature


RULES = {
    "max_tokens": Rule(1, np.int32),
    "temperature": Rule(0.0, np.float32),
    "top_k": Rule(-1, np.int32),
    "top_p": Rule(1.0, np.float32),
    "min_p": Rule(0.0, np.float32),
    "stop_tokens": Rule(-1, np.int32, ("stop_tokens",)),
    "min_tokens": Rule(0, np.int32, shapes_logits=True),
    "presence_penalty": Rule(0.0, np.float32, shapes_logits=True),
    "frequency_penalty": Rule(0.0, np.float32, shapes_logits=True),
    "repetition_penalty": Rule(1.0, np.float32, shapes_logits=True),
    "bias_tokens": Rule(-1, np.int32, ("biases",), shapes_logits=True),
    "bias_values": Rule(0.0, np.float32, ("biases",)),
    "allowed_tokens": Rule(-1, np.int32, ("allowed_tokens",), shapes_logits=True),
    "bad_words": Rule(-1, np.int32, ("bad_words", "bad_word_length"), shapes_logits=True),
}
NUMBERS = [name for name, rule in RULES.items() if not rule.capacities]  # fields of `SamplingParams`, too


@dataclass(frozen=True)
class Lists:
    """The token ids that a request names, each once."""

    stops: list[int]  # that end it, with the end-of-sequence tokens
    biases: dict[int, float]
    allowed: list[int]
    bad_words: list[tuple[int, ...]]  # a word that is a string may have two sequences


def lists_of(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    vocab_size: int | None,
    tokenize: Callable[[str], Sequence[int]] | None,
) -> Lists:
    """Return the token ids that a request names; `batch` describes the arguments.

    Raises:
        ValueError: the vocabulary does not have a token id, or so many tokens as log-probabilities are asked for; or
            bad words are strings and `tokenize` is None.
    """
    stops = (*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids))
    lists = Lists(
        stops=list(dict.fromkeys(stops)),
        biases=dict(params.logit_bias or {}),
        allowed=list(dict.fromkeys(params.allowed_token_ids or ())),
        bad_words=tokenized(params.bad_words or (), tokenize),
    )
    if vocab_size is None:
        return lists
    named = [("stop_token_ids", lists.stops), ("logit_bias", list(lists.biases)), ("allowed_token_ids", lists.allowed)]
    for name, ids in (*named, *(("bad_words", word) for word in lists.bad_words)):
        if outside := [token for token in ids if token >= vocab_size]:
            raise ValueError(f"{name} must be in [0, vocab_size = {vocab_size}), got {outside}")
    for name in ("logprobs", "prompt_logprobs"):
        most = getattr(params, name) or 0
        if most > vocab_size:
            raise ValueError(f"{name} must be at most vocab_size = {vocab_size}, got {most}")
    return lists


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
    if not (isinstance(params, Collection) and all(isinstance(p, SamplingParams) for p in params)):
        raise ValueError(f"params must be a sequence of SamplingParams, one for each row, got {params!r}")
    rows = [lists_of(p, eos_token_ids, vocab_size, tokenize) for p in params]

    def column(name: str) -> Array | None:
        values, rule = [getattr(p, name) for p in params], RULES[name]
        is_neutral = name not in ("max_tokens", "temperature") and all(value == rule.neutral for value in values)
        return None if is_neutral else jnp.asarray(values, rule.dtype)

    columns: dict[str, Any] = {name: column(name) for name in NUMBERS}
    stop_tokens = _padded([row.stops for row in rows])
    if stop_tokens is None:
        columns["min_tokens"] = None
    return Sampling(
        **columns,
        stop_tokens=stop_tokens,
        bias_tokens=_padded([list(row.biases) for row in rows]),
        bias_values=_padded([list(row.biases.values()) for row in rows], 0, jnp.float32),
        allowed_tokens=_padded([row.allowed for row in rows]),
        bad_words=_padded_words([row.bad_words for row in rows]),
        logits_processors=_shared_processors([p.logits_processors or () for p in params]),
        guide=guided.batch([_grammar(p) for p in params], vocab_size),
    )


def _grammar(params: SamplingParams) -> guided.Grammar | None:
    grammar = params.guided_decoding
    if grammar is not None and not isinstance(grammar, guided.Grammar):
        raise ValueError(f"guided_decoding must be compiled for a batch: a Grammar, got {grammar!r}")
    return grammar


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
