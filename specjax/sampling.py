"""Sampling parameters: what one request asks for, as arrays of a batch, and how they shape logits.

Plain and speculative decoding, target and draft share `process`. It applies, in this order: the request's own logits
processors, on what the model gives; logit bias; the masks (allowed tokens, guided decoding, bad words, min_tokens);
repetition, frequency and presence penalties; temperature; min-p; top-k; top-p.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from pallas_kernels.cut import min_logit
from specjax import guided
from specjax.guided import Grammar, Guide
from specjax.types import Array, Categorical, Context, is_integer

LogitsProcessor = Callable[[Array, Context], Array]

_MAX_INT = np.iinfo(np.int32).max
_IDS = f"ids in [0, {_MAX_INT}]"
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_POSITIVE = f"[{_LEAST:.1e}, {_MOST:.1e}]"


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Every value is checked, and every field honoured while speculating.

    Args:
        n: number of completions, ranked by the sum of their tokens' log-probabilities, the best first.
        best_of: number of completions to generate, of which the best n are returned; None is n. They share one pass
            over the prompt. At temperature 0, where all are the same, n and best_of must be 1.
        temperature: 0, which is greedy, or > 0.
        top_k: number of most likely tokens to keep, -1 for all; ties of the last are kept.
        top_p: probability mass to keep, in (0, 1].
        min_p: least probability to keep, relative to the most likely token's, in [0, 1].
        seed: integer that fixes the request's random numbers; None takes them from the call.
        stop: strings that end the text, which they are not part of.
        include_stop_str_in_output: make the stop string that ended the text a part of it.
        stop_token_ids: token ids that end the text.
        max_tokens: most tokens to generate.
        min_tokens: tokens to generate before a stop token may come, unless nothing else is allowed: a complete grammar
            ends the text before.
        ignore_eos: go on after the end-of-sequence token.
        presence_penalty: taken off the logit of every token that was generated, in [-2, 2].
        frequency_penalty: taken off as many times as the token was generated, in [-2, 2].
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that were generated or are
            in the prompt, > 0; 1 is none.
        logit_bias: token id -> what to add to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that may come; None is all.
        bad_words: words that may not come, as strings (each also with a space in front) or sequences of token ids. Only
            the last token of a word is forbidden, and only where the generated text ends with the tokens before it; a
            word whose beginning is in the prompt may be completed.
        logits_processors: functions `(logits [V], context) -> logits [V]` that JAX can trace, applied in their order.
            The context is of the one sequence: `tokens` [N] with the drafts, -1 from `length` on, and `prompt_length`.
            Functions that compare equal share a compilation; arrays bound by `jax.tree_util.Partial` may change
            without a new one.
        guided_decoding: a `specjax.guided.Grammar`, which the generated text follows.
        logprobs: how many of the most likely tokens to list with their log-probabilities at every generated token,
            beside the token itself; None is no log-probabilities. They are of the law that the token was drawn from,
            after all that these parameters do to it; at temperature 0, of that law at temperature 1.
        prompt_logprobs: the same for the tokens of the prompt, under the model's own law.
        detokenize: make text; without it there are token ids alone, and no stop strings.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: set those that are not left out apart by spaces.
        truncate_prompt_tokens: use the last so many tokens of the prompt; None is all.

    What the fields of a request forbid together must leave a token: where all are forbidden, any token may come.

    Raises:
        ValueError: for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str | Sequence[int]] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    guided_decoding: Grammar | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self):
        def require(name: str, expected: str, condition: bool) -> None:
            if not condition:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        def in_range(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            require(name, f"in [{low}, {high}]", _is_number(value) and low <= value <= high)

        def as_tuple(name: str) -> tuple:
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, str) else value
            require(name, "a sequence", isinstance(value, Iterable))
            return tuple(value)

        is_temperature = _is_number(self.temperature) and (self.temperature == 0 or _is_positive(self.temperature))
        require("temperature", f"0 or in {_POSITIVE}", is_temperature)
        is_top_k = is_integer(self.top_k) and (1 <= self.top_k <= _MAX_INT or self.top_k == -1)
        require("top_k", f"-1 or in [1, {_MAX_INT}]", is_top_k)
        require("top_p", "in (0, 1]", _is_number(self.top_p) and 0 < self.top_p <= 1)
        in_range("min_p", 0, 1)
        require("seed", "an integer or None", self.seed is None or is_integer(self.seed))
        require("max_tokens", f"in [1, {_MAX_INT}]", is_integer(self.max_tokens) and 1 <= self.max_tokens <= _MAX_INT)
        require(
            "min_tokens",
            f"in [0, max_tokens = {self.max_tokens}]",
            is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
        )
        in_range("presence_penalty", -2, 2)
        in_range("frequency_penalty", -2, 2)
        require("repetition_penalty", f"in {_POSITIVE}", _is_positive(self.repetition_penalty))

        stop = as_tuple("stop")
        require("stop", "made of non-empty strings", all(isinstance(s, str) and s for s in stop))
        stop_token_ids = as_tuple("stop_token_ids")
        require("stop_token_ids", _IDS, _are_ids(stop_token_ids))
        require("logit_bias", "a mapping", self.logit_bias is None or isinstance(self.logit_bias, Mapping))
        logit_bias = dict(self.logit_bias or {})
        are_biases = all(_is_number(bias) and -100 <= bias <= 100 for bias in logit_bias.values())
        require("logit_bias", f"{_IDS} with numbers in [-100, 100]", _are_ids(logit_bias) and are_biases)
        allowed = None if self.allowed_token_ids is None else as_tuple("allowed_token_ids")
        require(
            "allowed_token_ids",
            f"None or one or more {_IDS}",
            allowed != () and _are_ids(allowed or ()),
        )
        bad_words = tuple(
            tuple(word) if isinstance(word, Iterable) and not isinstance(word, str) else word
            for word in as_tuple("bad_words")
        )
        require(
            "bad_words",
            f"made of non-empty strings or sequences of {_IDS}",
            all(w and (isinstance(w, str) or (isinstance(w, tuple) and _are_ids(w))) for w in bad_words),
        )
        processors = as_tuple("logits_processors")
        are_functions = all(callable(f) and isinstance(f, Hashable) for f in processors)
        require("logits_processors", "hashable functions", are_functions)
        require(
            "guided_decoding",
            "None or a specjax.guided.Grammar, as of guided.from_regex",
            self.guided_decoding is None or isinstance(self.guided_decoding, Grammar),
        )
        require("n", ">= 1", is_integer(self.n) and self.n >= 1)
        is_best_of = self.best_of is None or (is_integer(self.best_of) and self.best_of >= self.n)
        require("best_of", f"None or >= n = {self.n}", is_best_of)
        for name in ("n", "best_of"):
            is_one = getattr(self, name) in (None, 1)
            require(name, "1 at temperature 0, where all completions are the same", is_one or self.temperature > 0)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(name, "None or >= 0", value is None or (is_integer(value) and value >= 0))
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            require(name, "True or False", isinstance(getattr(self, name), bool | np.bool))
        require("stop", "empty where detokenize is False", self.detokenize or not stop)
        truncated = self.truncate_prompt_tokens
        require(
            "truncate_prompt_tokens", "None or >= 1", truncated is None or (is_integer(truncated) and truncated >= 1)
        )
        for name, value in (
            ("stop", stop),
            ("stop_token_ids", stop_token_ids),
            ("logit_bias", logit_bias),
            ("allowed_token_ids", allowed),
            ("bad_words", bad_words),
            ("logits_processors", processors),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_samples(self) -> int:
        """Completions to generate."""
        return self.n if self.best_of is None else self.best_of


class Sampling(NamedTuple):
    """The sampling parameters of a batch. A field is None where no row uses it: what is not used costs nothing.

    The sizes N, W and M of lists are powers of two, so that few are compiled for.
    """

    max_tokens: Array  # [B] int32
    temperature: Array | None = None  # [B] float32; None is 1
    top_k: Array | None = None  # [B] int32, -1 for all
    top_p: Array | None = None  # [B] float32
    min_p: Array | None = None  # [B] float32
    stop_tokens: Array | None = None  # [B, N] int32, padded with -1
    min_tokens: Array | None = None  # [B] int32
    presence_penalty: Array | None = None  # [B] float32
    frequency_penalty: Array | None = None  # [B] float32
    repetition_penalty: Array | None = None  # [B] float32
    bias_tokens: Array | None = None  # [B, N] int32, padded with -1
    bias_values: Array | None = None  # [B, N] float32
    allowed_tokens: Array | None = None  # [B, N] int32, padded with -1; without any, all are allowed
    bad_words: Array | None = None  # [B, W, M] int32, each word padded with -1 in front
    logits_processors: tuple[tuple[Partial, Array], ...] | None = None  # each with the rows [B] bool that use it
    guide: Guide | None = None  # the grammars


def batch(
    params: Sequence[SamplingParams],
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> Sampling:
    """The parameters of several requests as arrays of a batch.

    Args:
        params: one a row.
        eos_token_ids: stop tokens of every row that does not ignore them.
        vocab_size: where given, token ids outside it are a ValueError.
        tokenize: the token ids of a text, without special tokens; for bad words that are strings.

    Returns:
        Sampling, with None for every feature that no row uses.

    Raises:
        ValueError: for ids outside the vocabulary, or bad words that are strings without `tokenize`.
    """
    stops = [p.stop_token_ids + (() if p.ignore_eos else tuple(eos_token_ids)) for p in params]
    biases = [list(p.logit_bias) for p in params]
    allowed = [p.allowed_token_ids or () for p in params]
    bad_words = [_tokenized(p.bad_words, tokenize) for p in params]
    named = {
        "stop_token_ids": stops,
        "logit_bias": biases,
        "allowed_token_ids": allowed,
        "bad_words": [word for words in bad_words for word in words],
    }
    for name, rows in named.items():
        for ids in rows:
            if vocab_size is not None and any(t >= vocab_size for t in ids):
                raise ValueError(f"{name} must be in [0, vocab_size = {vocab_size}), got {ids}")
    for name in ("logprobs", "prompt_logprobs"):
        most = max((getattr(p, name) or 0 for p in params), default=0)
        if vocab_size is not None and most > vocab_size:
            raise ValueError(f"{name} must be at most vocab_size = {vocab_size}, got {most}")

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
        bias_tokens=_padded(biases),
        bias_values=_padded([list(p.logit_bias.values()) for p in params], 0, jnp.float32),
        allowed_tokens=_padded(allowed),
        bad_words=_padded_words(bad_words),
        logits_processors=_shared_processors([p.logits_processors for p in params]),
        guide=guided.batch([p.guided_decoding for p in params], vocab_size),
    )


def process(sampling: Sampling, logits: Array, context: Context, drafts: Array, first: Array | int = 0) -> Categorical:
    """The distributions that requests sample from, row j with the history before it.

    A draft that a mask forbids stays where it is, with probability 0. A row where everything is forbidden is all -inf:
    verifiers and samplers give some id in range for it.

    Args:
        sampling: of the batch.
        logits: [B, T, V]; row j is of position context.length + first + j.
        context: prompt and committed tokens; with `guided_state` where the batch is guided.
        drafts: [B, K] int32, the tokens after the context; row j sees the first + j <= K first of them.
        first: index of the first row.

    Returns:
        Categorical [B, T, V].

    Raises:
        ValueError: for a grammar of another vocabulary, a context without its state, or a logits processor that returns
            another shape.
    """
    shape = logits.shape
    row = (first + jnp.arange(shape[1]))[None]  # [1, T] drafts before each row
    if sampling.logits_processors is not None:
        logits = _run_processors(sampling.logits_processors, logits, context, drafts, row)
    if sampling.bias_tokens is not None:
        logits += _scatter(sampling.bias_tokens, sampling.bias_values, shape[-1])[:, None]
    if sampling.allowed_tokens is not None:
        is_allowed = _contains(sampling.allowed_tokens, shape[-1])
        is_allowed |= jnp.all(sampling.allowed_tokens < 0, axis=1, keepdims=True)
        logits = jnp.where(is_allowed[:, None], logits, -jnp.inf)
    if sampling.guide is not None:
        logits = _guide(sampling.guide, logits, context, drafts, first)
    if sampling.bad_words is not None:
        banned = _completing(sampling.bad_words, context, drafts, row)
        index = jnp.arange(shape[0])[:, None, None], jnp.arange(shape[1])[None, :, None]
        logits = logits.at[*index, jnp.where(banned < 0, shape[-1], banned)].set(-jnp.inf, mode="drop")
    if sampling.min_tokens is not None:
        is_early = num_generated(context)[:, None] + row < sampling.min_tokens[:, None]  # [B, T]
        is_stop = _contains(sampling.stop_tokens, shape[-1])
        masked = jnp.where(is_stop[:, None] & is_early[..., None], -jnp.inf, logits)
        is_left = jnp.any(masked > -jnp.inf, axis=-1, keepdims=True)  # a complete grammar allows nothing but to stop
        logits = jnp.where(is_left, masked, logits)
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    if any(penalty is not None for penalty in penalties):
        logits = _penalize(*penalties, logits, context, drafts, row)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return Categorical(logits, sampling.temperature)

    def by_row(field: Array | None) -> Array | None:
        return None if field is None else jnp.broadcast_to(field[:, None], shape[:2])

    cut = min_logit(
        logits,
        temperature=by_row(sampling.temperature),
        top_k=by_row(sampling.top_k),
        top_p=by_row(sampling.top_p),
        min_p=by_row(sampling.min_p),
    )
    return Categorical(logits, sampling.temperature, cut)


def num_generated(context: Context) -> Array:
    """Committed tokens [B] that are not prompt."""
    return context.length - _prompt_length(context)


def _prompt_length(context: Context) -> Array:
    return jnp.zeros_like(context.length) if context.prompt_length is None else context.prompt_length


def _run_processors(
    processors: tuple[tuple[Partial, Array], ...], logits: Array, context: Context, drafts: Array, row: Array
) -> Array:
    """The logits after the functions of each row."""
    length = context.length[:, None] + row
    history = _history(context, drafts)[:, None]
    index = jnp.arange(history.shape[-1])[None, None]
    one = Context(
        tokens=jnp.where(index < length[..., None], history, -1),
        length=length,
        active=jnp.broadcast_to(context.active[:, None], length.shape),
        prompt_length=jnp.broadcast_to(_prompt_length(context)[:, None], length.shape),
    )
    for function, rows in processors:
        processed = jax.vmap(jax.vmap(function))(logits, one)
        if processed.shape != logits.shape:
            raise ValueError(
                f"logits_processors must return shape [V] = ({logits.shape[-1]},), "
                f"got {processed.shape[2:]} from {function.func}"
            )
        logits = jnp.where(rows[:, None, None], processed, logits)
    return logits


def _guide(guide: Guide, logits: Array, context: Context, drafts: Array, first: Array | int) -> Array:
    """The logits without what the grammar forbids."""
    if guide.token_classes.shape[1] != logits.shape[-1]:
        raise ValueError(
            f"guided_decoding must be of V = {logits.shape[-1]} tokens, got {guide.token_classes.shape[1]}"
        )
    if context.guided_state is None:
        raise ValueError("context must have a guided_state [B] where a request is guided, got None")
    states = guided.advance(guide, context.guided_state, drafts)
    states = jax.lax.dynamic_slice_in_dim(states, first, logits.shape[1], axis=1)
    return jnp.where(guided.allowed(guide, states), logits, -jnp.inf)


def _completing(bad_words: Array, context: Context, drafts: Array, row: Array) -> Array:
    """The last tokens [B, T, W] of the bad words that they would complete, -1 for the others."""
    prefix, last = bad_words[:, None, :, :-1], bad_words[:, None, :, -1]
    size = prefix.shape[-1]
    position = (context.length[:, None] + row)[..., None] - size + jnp.arange(size)[None, None]  # [B, T, M-1]
    is_output = position >= _prompt_length(context)[:, None, None]
    history = _history(context, drafts)[:, None]
    tokens = jnp.where(is_output, jnp.take_along_axis(history, jnp.maximum(position, 0), axis=-1), -1)
    return jnp.where(jnp.all((prefix < 0) | (prefix == tokens[:, :, None]), axis=-1), last, -1)


def _penalize(
    repetition: Array | None,
    frequency: Array | None,
    presence: Array | None,
    logits: Array,
    context: Context,
    drafts: Array,
    row: Array,
) -> Array:
    """The logits after the penalties. What was committed is counted once [B, V], the few drafts compared in place."""
    vocab_size = logits.shape[-1]
    index = jnp.arange(context.tokens.shape[1])[None]
    is_prompt = index < _prompt_length(context)[:, None]
    is_output = ~is_prompt & (index < context.length[:, None])
    count = _scatter(jnp.where(is_output, context.tokens, -1), jnp.int32(1), vocab_size)[:, None]
    ids = jnp.arange(vocab_size)[None, None]
    for i in range(drafts.shape[1]):
        count = count + ((drafts[:, i, None, None] == ids) & (i < row[..., None]))  # [B, T, V]
    if repetition is not None:
        is_seen = _contains(jnp.where(is_prompt, context.tokens, -1), vocab_size)[:, None] | (count > 0)
        factor = jnp.where(is_seen, repetition[:, None, None], 1)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
    if frequency is not None:
        logits -= frequency[:, None, None] * count
    if presence is not None:
        logits -= presence[:, None, None] * (count > 0)
    return logits


def _history(context: Context, drafts: Array) -> Array:
    """The committed tokens of each row, its drafts right after them [B, L + K]."""
    num_drafts = drafts.shape[1]
    slot = context.length[:, None] + jnp.arange(num_drafts)[None]
    tokens = jnp.pad(context.tokens, ((0, 0), (0, num_drafts)))
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slot].set(drafts)


def _scatter(ids: Array, values: Array, vocab_size: int) -> Array:
    """The sums [B, V] of the values of each id [B, N]; negative ids are left out."""
    rows = jnp.arange(ids.shape[0])[:, None]
    sums = jnp.zeros((ids.shape[0], vocab_size), values.dtype)
    return sums.at[rows, jnp.where(ids < 0, vocab_size, ids)].add(values, mode="drop")


def _contains(ids: Array, vocab_size: int) -> Array:
    """Which tokens [B, V] are among the ids [B, N]; negative ids are left out."""
    return _scatter(ids, jnp.int32(1), vocab_size) > 0


def _tokenized(
    words: Sequence[str | tuple[int, ...]], tokenize: Callable[[str], Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """The token sequences of bad words; a string gives one as it begins a text and one as it follows a space."""
    sequences = []
    for word in words:
        if not isinstance(word, str):
            sequences.append(word)
            continue
        if tokenize is None:
            raise ValueError(f"bad_words must be sequences of token ids where batch has no tokenize, got {word!r}")
        bare = word.lstrip()
        sequences += [tuple(tokenize(text)) for text in ((bare, " " + bare) if bare else (word,))]
        if () in sequences:
            raise ValueError(f"bad_words must have tokens, got {word!r}, which has none")
    return list(dict.fromkeys(sequences))


def _shared_processors(rows: Sequence[tuple[LogitsProcessor, ...]]) -> tuple[tuple[Partial, Array], ...] | None:
    """Every function with the rows that use it, those that rows have first in front: each row keeps its order."""
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
    """Rows of different lengths as an array [B, N], or None if all are empty."""
    width = max(map(len, rows), default=0)
    if not width:
        return None
    width = guided.round_up(width)
    return jnp.asarray([[*row, *[fill] * (width - len(row))] for row in rows], dtype)


def _padded_words(rows: Sequence[Sequence[tuple[int, ...]]]) -> Array | None:
    """Token sequences of each row as an array [B, W, M], padded in front, or None if there are none."""
    num_words = max(map(len, rows), default=0)
    if not num_words:
        return None
    size = guided.round_up(max(len(word) for words in rows for word in words))
    array = np.full((len(rows), guided.round_up(num_words), size), -1, np.int32)
    for i, words in enumerate(rows):
        for j, word in enumerate(words):
            array[i, j, size - len(word) :] = word
    return jnp.asarray(array)


def _are_ids(values: Iterable[object]) -> bool:
    return all(is_integer(value) and 0 <= value <= _MAX_INT for value in values)


def _is_positive(value: object) -> bool:
    """Whether a number is > 0 and finite in float32 too, where devices may take the smallest for 0."""
    return _is_number(value) and _LEAST <= float(value) <= _MOST


def _is_number(value: object) -> bool:
    return (is_integer(value) or isinstance(value, float | np.floating)) and math.isfinite(value)
