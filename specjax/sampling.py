"""Sampling parameters: what one request asks for, as arrays of a batch, and how they shape logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cut import min_logit
from specjax.types import Array, Categorical, Context


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Every value is checked; a field that is not honoured yet raises, it is never ignored.

    Args:
        temperature: float >= 0; 0 is greedy.
        top_k: number of most likely tokens to keep, -1 for all; ties of the last are kept.
        top_p: probability mass to keep, in (0, 1].
        min_p: least probability to keep, relative to the most likely token's, in [0, 1].
        seed: integer that fixes the request's random numbers; None takes them from the call.
        stop: strings that end the text; the text does not contain them.
        stop_token_ids: token ids that end the text.
        max_tokens: most tokens to generate.
        min_tokens: tokens to generate before a stop token may come.
        ignore_eos: go on after the end-of-sequence token.

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

    def __post_init__(self):
        _require(_is_number(self.temperature) and self.temperature >= 0, "temperature", ">= 0", self.temperature)
        _require(_is_int(self.top_k) and (self.top_k >= 1 or self.top_k == -1), "top_k", "-1 or >= 1", self.top_k)
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.seed is None or _is_int(self.seed), "seed", "an integer or None", self.seed)
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", ">= 1", self.max_tokens)
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"in [0, max_tokens = {self.max_tokens}]",
            self.min_tokens,
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        _require(all(isinstance(s, str) and s for s in stop), "stop", "made of non-empty strings", self.stop)
        object.__setattr__(self, "stop", stop)
        stop_token_ids = tuple(self.stop_token_ids or ())
        _require(all(_is_int(t) and t >= 0 for t in stop_token_ids), "stop_token_ids", "ids >= 0", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)


class Sampling(NamedTuple):
    """The sampling parameters of a batch. A field is None where no row uses it: what is not used costs nothing."""

    max_tokens: Array  # [B] int32
    temperature: Array | None = None  # [B] float32; None is 1
    top_k: Array | None = None  # [B] int32, -1 for all
    top_p: Array | None = None  # [B] float32
    min_p: Array | None = None  # [B] float32
    stop_tokens: Array | None = None  # [B, N] int32, padded with -1
    min_tokens: Array | None = None  # [B] int32


def batch(
    params: Sequence[SamplingParams], eos_token_ids: Sequence[int] = (), vocab_size: int | None = None
) -> Sampling:
    """The parameters of several requests as arrays of a batch.

    Args:
        params: one a row.
        eos_token_ids: stop tokens of every row that does not ignore them.
        vocab_size: where given, stop ids outside it are a ValueError.

    Returns:
        Sampling, with None for every feature that no row uses.
    """
    stops = [p.stop_token_ids + (() if p.ignore_eos else tuple(eos_token_ids)) for p in params]
    for ids in stops:
        if vocab_size is not None and any(t >= vocab_size for t in ids):
            raise ValueError(f"stop_token_ids must be in [0, vocab_size = {vocab_size}), got {ids}")
    width = max((len(ids) for ids in stops), default=0)
    stop_tokens = np.array([list(ids) + [-1] * (width - len(ids)) for ids in stops], np.int32)

    def column(name: str, dtype: type, unused: float) -> Array | None:
        values = [getattr(p, name) for p in params]
        return None if all(v == unused for v in values) else jnp.asarray(values, dtype)

    return Sampling(
        max_tokens=jnp.asarray([p.max_tokens for p in params], jnp.int32),
        temperature=jnp.asarray([p.temperature for p in params], jnp.float32),
        top_k=column("top_k", jnp.int32, -1),
        top_p=column("top_p", jnp.float32, 1),
        min_p=column("min_p", jnp.float32, 0),
        stop_tokens=jnp.asarray(stop_tokens) if width else None,
        min_tokens=column("min_tokens", jnp.int32, 0) if width else None,
    )


def process(sampling: Sampling, logits: Array, context: Context, drafts: Array, first: Array | int = 0) -> Categorical:
    """The distributions that requests sample from, row j with the history before it.

    Args:
        sampling: of the batch.
        logits: [B, T, V]; row j is of position context.length + first + j.
        context: prompt and committed tokens.
        drafts: [B, K] int32, the tokens after the context; row j sees the first + j first of them.
        first: index of the first row.

    Returns:
        Categorical [B, T, V].
    """
    row = (first + jnp.arange(logits.shape[1]))[None]
    if sampling.min_tokens is not None:
        generated = num_generated(context)[:, None] + row  # [B, T]
        logits = jnp.where(
            _is_stop(sampling, logits.shape[-1])[:, None] & (generated < sampling.min_tokens[:, None])[..., None],
            -jnp.inf,
            logits,
        )
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return Categorical(logits, sampling.temperature)

    def by_row(field: Array | None) -> Array | None:
        return None if field is None else jnp.broadcast_to(field[:, None], logits.shape[:2])

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
    return context.length if context.prompt_length is None else context.length - context.prompt_length


def _is_stop(sampling: Sampling, vocab_size: int) -> Array:
    """Which tokens [B, V] stop each row."""
    batch_size = sampling.stop_tokens.shape[0]
    return (
        jnp.zeros((batch_size, vocab_size), bool)
        .at[jnp.arange(batch_size)[:, None], jnp.where(sampling.stop_tokens < 0, vocab_size, sampling.stop_tokens)]
        .set(True, mode="drop")
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float | np.floating)) and math.isfinite(value)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {got!r}")
