"""The sampling parameters of one request, and their checks."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.sampling.guided.sources import Source
from specjax.sampling.guided.tables import Grammar
from specjax.types import Array, Context
from specjax.validation import as_python, is_integer, is_iterable

LogitsProcessor = Callable[[Array, Context], Array]


_MAX_INT = np.iinfo(np.int32).max
_IDS = f"ids in [0, {_MAX_INT}]"
_TEXTS = "non-empty strings that UTF-8 can encode"
_NO_SEQUENCES = bytes | bytearray | Mapping  # their elements would pass for token ids or strings
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_POSITIVE = f"[{_LEAST:.1e}, {_MOST:.1e}]"


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. Every value is checked, and every field works with speculation.

    The fields together should leave at least one token to choose. Where they forbid all tokens, any token may follow.

    Args:
        n: the number of completions to return, the best first by the sum of their tokens' log-probabilities.
        best_of: the number of completions to generate, of which the best n are returned; None is n. At temperature 0,
            where all completions are the same, n and best_of must be 1.
        temperature: 0, which is greedy, or a positive number.
        top_k: the number of most likely tokens to keep; -1 keeps all. Tokens as likely as the last one are kept too
            (`sampling.ExactTopK` keeps exactly k).
        top_p: the probability mass to keep, in (0, 1]. Tokens as likely as the last one are kept too.
        min_p: the smallest probability to keep, relative to the probability of the most likely token, in [0, 1].
        seed: an integer that fixes the request's random numbers; None takes them from the call.
        stop: strings that end the text. They are not part of it.
        include_stop_str_in_output: whether the stop string that ended the text is part of it.
        stop_token_ids: token ids that end the text.
        max_tokens: the largest number of tokens to generate.
        min_tokens: the number of tokens to generate before a stop token may follow. A stop token may follow earlier if
            nothing else is allowed, as in a complete text of a grammar.
        ignore_eos: whether to continue after the end-of-sequence token.
        presence_penalty: a number in [-2, 2] that is subtracted from the logit of every generated token.
        frequency_penalty: a number in [-2, 2] that is subtracted from a token's logit once for each time that the token
            was generated.
        repetition_penalty: a positive number that divides the positive logits, and multiplies the negative logits, of
            tokens in the prompt or the generated text; 1 has no effect.
        logit_bias: a number in [-100, 100] for each token id, which is added to the token's logit.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        bad_words: words that must not be generated, as strings (which are forbidden after a space, too) or sequences of
            token ids. Only the last token of a word is forbidden, and only if the generated text ends with the tokens
            before it. A word that begins in the prompt may be completed.
        logits_processors: functions `(logits [V], context) -> logits [V]` that JAX can trace, applied in their order to
            the model's logits. The context describes the one sequence: `tokens` [N] with the drafts, -1 from `length`
            on, and `prompt_length`. Functions that compare equal share a compilation; in `sampling.batch` arrays that
            are bound by `jax.tree_util.Partial` may change without another compilation.
        guided_decoding: a `specjax.guided.Grammar` that the generated text must follow. `Engine` and `LLM` also take
            its source, `guided.Regex`, `guided.JsonSchema` or `guided.Choices`, and compile it.
        logprobs: how many of the most likely tokens to list with their log-probabilities for every generated token,
            beside the token itself; None lists none. The log-probabilities belong to the distribution from which the
            token was drawn, after the effect of all these parameters; at temperature 0, of this distribution at
            temperature 1.
        prompt_logprobs: the same number for the tokens of the prompt, under the model's logits as they are.
        detokenize: whether to make text. Without text there are only token ids, and no stop strings.
        skip_special_tokens: whether to leave special tokens out of the text.
        spaces_between_special_tokens: whether to put spaces between special tokens that are not left out.
        truncate_prompt_tokens: how many of the last tokens of the prompt to use; None uses all.

    Raises:
        ValueError: a value is outside its range.
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
    guided_decoding: Grammar | Source | None = None
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
        self._check_shaping()
        self._check_counts()
        sequences = self._checked_sequences()
        self._require(
            "guided_decoding",
            "None or a specjax.guided.Grammar, as guided.from_regex returns, or what an engine compiles to one",
            self.guided_decoding is None or isinstance(self.guided_decoding, Grammar | Source),
        )
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            self._require(name, "True or False", isinstance(getattr(self, name), bool | np.bool))
        self._require("stop", "empty where detokenize is False", self.detokenize or not sequences["stop"])
        for name in vars(self):
            object.__setattr__(self, name, sequences.get(name, as_python(getattr(self, name))))

    def _require(self, name: str, expected: str, condition: bool) -> None:
        if not condition:
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    def _check_shaping(self) -> None:
        """Check the numbers that change the distribution of tokens, and the seed."""
        is_temperature = _is_number(self.temperature) and (self.temperature == 0 or _is_positive(self.temperature))
        self._require("temperature", f"0 or in {_POSITIVE}", is_temperature)
        is_top_k = is_integer(self.top_k) and (1 <= self.top_k <= _MAX_INT or self.top_k == -1)
        self._require("top_k", f"-1 or in [1, {_MAX_INT}]", is_top_k)
        self._require("top_p", "in (0, 1]", _is_number(self.top_p) and 0 < self.top_p <= 1)
        for name, low, high in (("min_p", 0, 1), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)):
            value = getattr(self, name)
            self._require(name, f"in [{low}, {high}]", _is_number(value) and low <= value <= high)
        self._require("repetition_penalty", f"in {_POSITIVE}", _is_positive(self.repetition_penalty))
        is_seed = self.seed is None or (is_integer(self.seed) and -(2**63) <= int(self.seed) < 2**64)
        self._require("seed", "None or an integer in [-2**63, 2**64)", is_seed)

    def _check_counts(self) -> None:
        """Check the numbers of tokens and of completions."""
        is_max_tokens = is_integer(self.max_tokens) and 1 <= self.max_tokens <= _MAX_INT
        self._require("max_tokens", f"in [1, {_MAX_INT}]", is_max_tokens)
        is_min_tokens = is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        self._require("min_tokens", f"in [0, max_tokens = {self.max_tokens}]", is_min_tokens)
        self._require("n", ">= 1", is_integer(self.n) and self.n >= 1)
        is_best_of = self.best_of is None or (is_integer(self.best_of) and self.best_of >= self.n)
        self._require("best_of", f"None or >= n = {self.n}", is_best_of)
        for name in ("n", "best_of"):
            is_one = getattr(self, name) in (None, 1)
            self._require(
                name, "1 at temperature 0, where all completions are the same", is_one or self.temperature > 0
            )
        for name, least in (("logprobs", 0), ("prompt_logprobs", 0), ("truncate_prompt_tokens", 1)):
            value = getattr(self, name)
            self._require(name, f"None or >= {least}", value is None or (is_integer(value) and value >= least))

    def _checked_sequences(self) -> dict[str, Any]:
        """Check the fields that hold several values, and return them as tuples or, `logit_bias`, as a dict."""

        def as_tuple(name: str) -> tuple:
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, str) else value
            self._require(name, "a sequence", is_iterable(value) and not isinstance(value, _NO_SEQUENCES))
            return tuple(value)

        stop = as_tuple("stop")
        self._require("stop", f"made of {_TEXTS}", all(map(_is_text, stop)))
        stop_token_ids = as_tuple("stop_token_ids")
        self._require("stop_token_ids", _IDS, _are_ids(stop_token_ids))
        self._require("logit_bias", "a mapping", self.logit_bias is None or isinstance(self.logit_bias, Mapping))
        logit_bias = dict(self.logit_bias or {})
        are_biases = all(_is_number(bias) and -100 <= bias <= 100 for bias in logit_bias.values())
        self._require("logit_bias", f"{_IDS} with numbers in [-100, 100]", _are_ids(logit_bias) and are_biases)
        allowed = None if self.allowed_token_ids is None else as_tuple("allowed_token_ids")
        self._require("allowed_token_ids", f"None or one or more {_IDS}", allowed != () and _are_ids(allowed or ()))
        bad_words = tuple(
            tuple(word) if is_iterable(word) and not isinstance(word, str | Set | _NO_SEQUENCES) else word
            for word in as_tuple("bad_words")
        )
        are_words = all(_is_text(w) or (isinstance(w, tuple) and w and _are_ids(w)) for w in bad_words)
        self._require("bad_words", f"made of {_TEXTS} or sequences of {_IDS}", are_words)
        processors = as_tuple("logits_processors")
        are_functions = all(callable(f) and isinstance(f, Hashable) for f in processors)
        self._require("logits_processors", "hashable functions", are_functions)
        return {
            "stop": stop,
            "stop_token_ids": _as_ids(stop_token_ids),
            "logit_bias": {int(token): float(bias) for token, bias in logit_bias.items()},
            "allowed_token_ids": None if allowed is None else _as_ids(allowed),
            "bad_words": tuple(word if isinstance(word, str) else _as_ids(word) for word in bad_words),
            "logits_processors": processors,
        }

    @property
    def num_samples(self) -> int:
        """The number of completions to generate."""
        return self.n if self.best_of is None else self.best_of


def _is_text(value: Any) -> bool:
    """Return whether a value is a string that is not empty and that UTF-8 can encode."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _are_ids(values: Iterable[Any]) -> bool:
    return all(is_integer(value) and 0 <= value <= _MAX_INT for value in values)


def _as_ids(values: Iterable[Any]) -> tuple[int, ...]:
    """Return ids as integers of Python."""
    return tuple(int(value) for value in values)


def _is_positive(value: Any) -> bool:
    """Return whether a number is positive and finite in float32, where devices may treat denormal numbers as 0."""
    return _is_number(value) and _LEAST <= as_python(value) <= _MOST


def _is_number(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, float | np.floating) and math.isfinite(value))
