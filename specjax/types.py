"""The records that every part of specjax passes around, and the contracts of models, proposers and scorers.

Shapes: B sequences, K draft tokens, T query tokens, V vocabulary, L token buffer, R packed rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PyTree = Any

FLOATS = ("float32", "bfloat16", "float16", "float64")  # the dtypes of logits, and of what goes with them


def is_integer(value: object) -> bool:
    """Whether a number given by the caller is a whole one, of Python or NumPy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Categorical(NamedTuple):
    """A categorical distribution per row: softmax of logits / temperature, kept where logits >= min_logit.

    With `rows`, the logits are packed: row (b, t) is `logits[rows[b, t]]`, and `min_logit` and `log_normalizer` have
    shape [R].
    """

    logits: Array  # [B, T, V] float32 or bfloat16 ([R, V] with rows); -inf excludes a token
    temperature: Array | None = None  # [B] float32; None is 1; 0 puts all mass on the argmax (lowest id wins a tie)
    min_logit: Array | None = None  # [B, T] float32: the smallest kept logit of the row
    log_normalizer: Array | None = None  # [B, T] float32: logsumexp of the kept logits / temperature
    rows: Array | None = None  # [B, T] int32

    @classmethod
    def from_probs(cls, probs: Array) -> "Categorical":
        """The distribution of given probabilities [B, T, V]; rows are normalised, a zero excludes its token."""
        logits = jnp.log(jnp.asarray(probs))
        if logits.dtype.name not in FLOATS:
            raise ValueError(f"probs must be of one of the dtypes {', '.join(FLOATS)}, got {jnp.result_type(probs)}")
        return cls(logits)


class Draft(NamedTuple):
    """Draft tokens and the law they were drawn from.

    `distribution` is exactly what each token was drawn from; None means deterministic (one-hot) drafts. A row of draft
    temperature 0 is deterministic too, and its logits are not read.
    """

    tokens: Array  # [B, K] int32, -1 where a row has fewer
    distribution: Categorical | None = None
    num_tokens: Array | None = None  # [B] int32 in [0, K]; None is K everywhere


class Verified(NamedTuple):
    """What a verifier emits: accepted drafts, then one recovered or bonus token, then -1."""

    tokens: Array  # [B, K+1] int32
    num_accepted: Array  # [B] int32, draft tokens only
    log_probs: Array | None = None  # [B, K+1] float32 of each emitted token under the target row it stands in
    is_accepted: Array | None = None  # [B, K] bool, the outcome of each draft's own test; false where there is no draft


class ModelInput(NamedTuple):
    """The query tokens of one model call."""

    tokens: Array  # [B, T] int32
    positions: Array  # [B, T] int32, never negative
    mask: Array | None = None  # [B, T, T] bool inside the call (trees); None is causal


class ModelOutput(NamedTuple):
    """Logits of every query token, and hidden states for proposers that want them."""

    logits: Array  # [B, T, V]
    features: Any = None


class Context(NamedTuple):
    """The tokens of each sequence. The last committed one has not been fed to the target yet."""

    tokens: Array  # [B, L] int32, prompt and committed tokens
    length: Array  # [B] int32, committed
    active: Array  # [B] bool
    prompt_length: Array | None = None  # [B] int32, how many of them are prompt; None is 0
    guided_state: Array | None = None  # [B] int32, of the grammar after them; None without guided decoding


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["apply", "init_cache", "vocab_size", "max_length"],
)
@dataclass(frozen=True)
class Model:
    """A language model as a pytree: params are leaves, the functions static.

    `apply` writes the T tokens of a call to the consecutive cache slots positions[:, 0] + arange(T), overwriting what
    was there; a token sees the slots before positions[:, 0] and, inside the call, those that the mask allows. Every
    cache leaf has the batch as its leading axis. Give module-level functions or frozen dataclasses with `__call__`:
    they compare by value, so a model built again does not retrace.
    """

    params: PyTree
    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]
    init_cache: Callable[[int, int], PyTree]  # (batch_size, max_length) -> cache
    vocab_size: int
    max_length: int | None = None


class Proposer(Protocol):
    """Makes drafts. A pytree dataclass: weights are leaves, options static; all methods pure.

    Every leaf of the state has the batch as its leading axis. `prefill` sees a context that holds the prompts alone;
    `update` the context that the drafts were made for, before the verified tokens are committed. Its `num_accepted` is
    0 where a row had no drafts of this proposer.
    """

    num_draft_tokens: int  # K, the width of every draft

    def init(self, batch_size: int, max_length: int) -> PyTree: ...

    def prefill(self, context: Context, features: Any, state: PyTree) -> PyTree: ...

    def propose(self, keys: Array, context: Context, sampling: Any, state: PyTree) -> tuple[Draft, PyTree]: ...

    def update(self, context: Context, verified: Verified, features: Any, state: PyTree) -> PyTree: ...


class Verifier(Protocol):
    """Accepts or rejects drafts, given keys, the draft and the target's distributions of the K+1 next positions."""

    def __call__(self, keys: Array, draft: Draft, target: Categorical | Array, **options: Any) -> Verified: ...


class Scorer(Protocol):
    """Runs the target over a draft: logits of the K+1 positions after the committed tokens."""

    def __call__(self, model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]: ...
