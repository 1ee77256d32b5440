"""The sampling parameters of one request as arrays whose sizes do not depend on the request.

A batch whose requests come and go keeps one compiled program if each request has the same arrays. Parameters that a
request does not use have neutral values, which change no number of a distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax.sampling.arrays import NUMBERS, RULES, Sampling, lists_of
from specjax.sampling.guided.tables import Grammar, Guide
from specjax.sampling.params import LogitsProcessor, SamplingParams
from specjax.validation import as_python, is_integer

_UNKNOWN = -1  # stands for a grammar whose place in the tables is not known yet


class Needs(IntEnum):
    """The sampling features that a step computes. A step serves every request that needs no more than it computes."""

    GREEDY = 0  # argmaxima
    CUT = 1  # temperatures, min-p, top-k and top-p
    EVERYTHING = 2  # all parameters


@dataclass(frozen=True)
class Capacities:
    """The most that one request may ask for. A capacity of 0 leaves the parameter out of the program.

    Grammars are shared: their capacities hold for all that a batch uses at a time.

    Raises:
        ValueError: a capacity is not an integer >= 0.
    """

    stop_tokens: int = 16  # number of stop tokens, with the end-of-sequence tokens
    biases: int = 300  # number of tokens in logit_bias
    allowed_tokens: int = 256  # number of allowed_token_ids
    bad_words: int = 32  # number of bad_words; a string counts twice, as it is forbidden after a space, too
    bad_word_length: int = 8  # number of tokens of a bad word
    logprobs: int = 20  # number of most likely tokens in logprobs and prompt_logprobs
    grammars: int = 0  # number of grammars
    grammar_states: int = 4096  # number of their states, all together
    grammar_classes: int = 512  # number of classes of tokens of one grammar
    samples: int = 128  # number of completions that are generated of a prompt, n or best_of
    logits_processors: tuple[LogitsProcessor, ...] = ()  # those that requests may use, in this order

    def __post_init__(self):
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if not (is_integer(value) and value >= 0):
                raise ValueError(f"{field.name} must be an integer >= 0, got {value!r}")
            object.__setattr__(self, field.name, as_python(value))
        functions: Any = self.logits_processors
        if not (isinstance(functions, Sequence) and all(map(callable, functions))):
            raise ValueError(f"logits_processors must be functions, got {functions!r}")


def neutral(capacities: Capacities) -> Sampling:
    """Return the parameters of a greedy request that asks for nothing, as host arrays without the axis of the batch."""
    return _sampling(_arrays(capacities), [False] * len(capacities.logits_processors), False, capacities)


def _arrays(capacities: Capacities) -> dict[str, np.ndarray]:
    """Return the neutral array of every field."""
    return {
        name: np.full([getattr(capacities, size) for size in rule.capacities], rule.neutral, rule.dtype)
        for name, rule in RULES.items()
    }


def _sampling(
    arrays: dict[str, np.ndarray], processors: Sequence[bool], is_guided: bool, capacities: Capacities
) -> Sampling:
    """Return the fields, where None stands for an array of size 0.

    Args:
        arrays: the fields that are arrays of the request alone.
        processors: whether the request uses each of the logits processors.
        is_guided: whether it has a grammar; which one is not known yet.
        capacities: the sizes.
    """
    functions = zip(capacities.logits_processors, processors, strict=True)
    fields: dict[str, Any] = {name: array if array.size else None for name, array in arrays.items()}
    fields["logits_processors"] = tuple((Partial(f), np.array(is_used)) for f, is_used in functions) or None
    if capacities.grammars:
        of_row: Any = None, None, np.array(_UNKNOWN if is_guided else 0, np.int32), np.zeros((), np.int32)
        fields["guide"] = Guide(*of_row)
    return Sampling(**fields)


def placed(sampling: Sampling, guide: Guide | None) -> Sampling:
    """Return the parameters of one request with the place of its grammar, None for a request without one.

    Raises:
        ValueError: there is a grammar without a place, or a place without a grammar.
    """
    is_guided = sampling.guide is not None and int(sampling.guide.grammar) == _UNKNOWN
    if is_guided != (guide is not None):
        expected = "the place of the request's grammar" if is_guided else "None for a request without a grammar"
        raise ValueError(f"guide must be {expected}, got {guide}")
    return sampling if guide is None else sampling._replace(guide=guide)


def neutral_like(sampling: Sampling) -> Sampling:
    """Return neutral parameters of the shapes of `sampling`."""
    arrays = {name: getattr(sampling, name) for name in RULES}
    zeros = jax.tree.map(jnp.zeros_like, sampling)
    return zeros._replace(
        **{name: None if array is None else jnp.full_like(array, RULES[name].neutral) for name, array in arrays.items()}
    )


def of_request(
    params: SamplingParams,
    capacities: Capacities,
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> Sampling:
    """Return the sampling parameters of one request as host arrays, padded to the capacities.

    Args:
        params: the parameters of the request.
        capacities: the sizes of the arrays.
        eos_token_ids: the stop tokens of a request that does not ignore them.
        vocab_size: V; None leaves out the check that token ids are smaller than V.
        tokenize: a function that returns the token ids of a text, without special tokens. Bad words that are strings
            need it.

    Returns:
        Sampling, whose fields have the shapes of a batch's fields without the axis of the batch.

    Raises:
        ValueError: the request asks for more than a capacity, or `sampling.batch` refuses it.

    Example:
        >>> of_request(SamplingParams(stop_token_ids=[7]), Capacities(stop_tokens=3)).stop_tokens
        array([ 7, -1, -1], dtype=int32)
    """
    lists = lists_of(params, eos_token_ids, vocab_size, tokenize)
    stops, biases, allowed, words = lists.stops, lists.biases, lists.allowed, lists.bad_words
    grammar = params.guided_decoding
    if isinstance(grammar, Grammar):
        check_grammar(grammar, capacities, vocab_size)
    _check("guided_decoding", "grammars", "grammars", int(grammar is not None), capacities)
    _check("stop_token_ids", "stop_tokens", "ids, with those of the end of a sequence", len(stops), capacities)
    _check("logit_bias", "biases", "tokens", len(biases), capacities)
    _check("allowed_token_ids", "allowed_tokens", "ids", len(allowed), capacities)
    _check("bad_words", "bad_words", "words, where a string is two", len(words), capacities)
    _check("bad_words", "bad_word_length", "tokens in a word", max(map(len, words), default=0), capacities)
    for name in ("logprobs", "prompt_logprobs"):
        _check(name, "logprobs", "tokens", getattr(params, name) or 0, capacities)
    _check("n" if params.best_of is None else "best_of", "samples", "completions", params.num_samples, capacities)

    arrays = _arrays(capacities)
    for name in NUMBERS:
        arrays[name][...] = getattr(params, name)
    arrays["stop_tokens"][: len(stops)] = stops
    arrays["bias_tokens"][: len(biases)] = list(biases)
    arrays["bias_values"][: len(biases)] = list(biases.values())
    arrays["allowed_tokens"][: len(allowed)] = allowed
    for i, word in enumerate(words):
        arrays["bad_words"][i, capacities.bad_word_length - len(word) :] = word
    processors = _uses_of(params.logits_processors or (), capacities.logits_processors)
    return _sampling(arrays, processors, grammar is not None, capacities)


def check_grammar(grammar: Grammar, capacities: Capacities, vocab_size: int | None = None) -> None:
    """Raise ValueError for a grammar that is larger than the capacities, or than a vocabulary."""
    known, (num_states, num_classes) = len(grammar.token_classes), grammar.transitions.shape
    if vocab_size is not None and known > vocab_size:
        raise ValueError(f"guided_decoding must have at most vocab_size = {vocab_size} tokens, got {known}")
    _check("guided_decoding", "grammars", "grammars", 1, capacities)
    _check("guided_decoding", "grammar_states", "states", num_states, capacities)
    _check("guided_decoding", "grammar_classes", "classes of tokens", num_classes, capacities)


def _check(name: str, capacity: str, unit: str, number: int, capacities: Capacities) -> None:
    limit = getattr(capacities, capacity)
    if number > limit:
        raise ValueError(f"{name} must have at most {limit} {unit} (Capacities.{capacity}), got {number}")


def _uses_of(functions: Sequence[LogitsProcessor], known: Sequence[LogitsProcessor]) -> list[bool]:
    """Return which of the known logits processors are `functions`, which must be some of them, in their order."""
    if [function for function in known if function in functions] != list(functions):
        raise ValueError(
            f"logits_processors must be some of Capacities.logits_processors = {tuple(known)!r}, in their order, "
            f"got {tuple(functions)!r}"
        )
    return [function in functions for function in known]


def needs_of(row: Sampling) -> Needs:
    """Return which sampling features a request needs, by the parameters that `of_request` gave."""
    shaping = {name: getattr(row, name) for name, rule in RULES.items() if rule.shapes_logits}
    changes_logits = any(array is not None and np.any(array != RULES[name].neutral) for name, array in shaping.items())
    changes_logits |= row.guide is not None and bool(row.guide.grammar != 0)
    if changes_logits or any(is_used for _, is_used in row.logits_processors or ()):
        return Needs.EVERYTHING
    return Needs.CUT if row.temperature is not None and row.temperature > 0 else Needs.GREEDY


def keep_only(sampling: Sampling, needs: int) -> Sampling:
    """Leave out of the program the parameters that a step with these `Needs` does not compute."""
    if needs == Needs.EVERYTHING:
        return sampling
    some = Sampling(sampling.max_tokens, stop_tokens=sampling.stop_tokens)
    if needs == Needs.GREEDY:
        return some._replace(temperature=jnp.zeros(sampling.max_tokens.shape, jnp.float32))
    return some._replace(**{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")})
