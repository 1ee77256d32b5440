"""Verification by the Pallas kernels: from the records of specjax to arrays and back.

The rules are those of the cores, and the random streams too, so the tokens are the same but where rounding decides. The
kernels work under jit, vmap and loops, and inside `jax.shard_map` that splits the batch and leaves rows whole. Logits
that are sharded otherwise are left to XLA, which splits its operations as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.accept import Evidence, accept, accept_ratio
from pallas_kernels.recover import recover
from pallas_kernels.rows import Rows, in_parts, is_partitioned
from pallas_kernels.sample import sample
from pallas_kernels.statistics import Streams, row_statistics
from pallas_kernels.triton import plgpu
from specjax import distributions
from specjax import keys as streams
from specjax.types import Array, Categorical, Draft, Verified

STREAMS = Streams(streams.ACCEPT, streams.RESIDUAL, streams.NUM_PURPOSES)
SMALL_VOCAB = 2048  # below it a few fused operations do as well
MAX_DRAFT_TOKENS = 64  # all of them are lanes of one program
_SUPPORTED = (jnp.float32, jnp.bfloat16, jnp.float16)


def unsupported(draft: Draft, target: Categorical) -> str | None:
    """What the kernels support and this case is not, by shapes and dtypes; None if they support it."""
    if plgpu is None:
        return f"a JAX with the Triton backend of Pallas, not {jax.__version__}"
    for name, distribution in (("target", target), ("draft.distribution", draft.distribution)):
        if distribution is not None and distribution.logits.dtype not in _SUPPORTED:
            return f"{name} of dtype float32, bfloat16 or float16, not {distribution.logits.dtype}"
    batch_size, num_draft_tokens = draft.tokens.shape
    if batch_size == 0:
        return "a batch of at least one sequence"
    if num_draft_tokens > MAX_DRAFT_TOKENS:
        return f"at most {MAX_DRAFT_TOKENS} draft tokens, not {num_draft_tokens}"
    return None


def is_worthwhile(target: Categorical) -> bool:
    """Whether the kernels are faster than XLA, by shapes and placement."""
    return target.logits.shape[-1] >= SMALL_VOCAB and not is_partitioned(target.logits)


def by_sample(
    keys: Array, draft: Draft, target: Categorical, *, bonus_tokens: Array | None, log_probs: bool, interpret: bool
) -> Verified:
    """The kernels of `match`, and of deterministic drafts."""
    has_drafts = draft.tokens.shape[1] > 0
    tokens, num_accepted, log_prob = sample(
        jax.random.key_data(keys),
        _rows(target._replace(log_normalizer=None)),
        draft.tokens.astype(jnp.int32) if has_drafts else None,
        draft.num_tokens if has_drafts else None,
        bonus_tokens,
        purpose=streams.TARGET,
        log_probs=log_probs,
        interpret=interpret,
    )
    if num_accepted is None:
        num_accepted = jnp.zeros(draft.tokens.shape[:1], jnp.int32)
    return Verified(tokens, num_accepted, log_prob)


def by_residual(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    rule: Callable[[Evidence, Any], Array] | None,
    options: Any = None,
    entropy: bool = False,
    recover_best: bool = False,
    bonus_tokens: Array | None,
    log_probs: bool,
    interpret: bool,
) -> Verified:
    """The kernels of rules that accept by probability and recover from the residual; `rule` None is block's."""
    if draft.tokens.shape[1] == 0:
        no_draft = Draft(jnp.full((draft.tokens.shape[0], 1), -1, jnp.int32))
        options = {"entropy": entropy, "recover_best": recover_best, "bonus_tokens": bonus_tokens}
        verified = by_residual(
            keys, no_draft, target, rule=accept_ratio, log_probs=log_probs, interpret=interpret, **options
        )
        return jax.tree.map(lambda field: field[:, :1] if field.ndim == 2 else field, verified)
    target_rows = _rows(target._replace(log_normalizer=None))
    draft_rows = None if draft.distribution is None else _rows(draft.distribution)
    tokens, num_tokens = draft.tokens.astype(jnp.int32), draft.num_tokens
    statistics = decision = None
    for positions in in_parts(target_rows, tokens.shape[1]) if rule else [None]:
        statistics = row_statistics(
            jax.random.key_data(keys),
            tokens,
            num_tokens,
            target_rows,
            draft_rows,
            streams=STREAMS,
            positions=positions,
            begun=statistics,
            num_accepted=None if decision is None else decision.num_accepted,
            entropy=entropy,
            interpret=interpret,
        )
        decision = accept(
            tokens, num_tokens, target_rows, draft_rows, statistics, options, rule=rule, interpret=interpret
        )
    return Verified(
        *recover(
            tokens,
            target_rows,
            draft_rows,
            statistics,
            decision,
            bonus_tokens,
            recover_best=recover_best,
            log_probs=log_probs,
            interpret=interpret,
        )
    )


def by_draft(
    keys: Array, draft: Draft, target: Categorical, *, rule: Callable[[Evidence, Any], Array] | None, **options: Any
) -> Verified:
    """`by_residual` where drafts were sampled, `by_sample` where they are deterministic."""
    has_drafts = draft.tokens.shape[1] > 0
    if draft.distribution is None if has_drafts else options["bonus_tokens"] is None:
        return by_sample(keys, draft, target, **options)
    return by_residual(keys, draft, target, rule=rule, **options)


rejection = partial(by_draft, rule=accept_ratio)
block = partial(by_draft, rule=None)


def _rows(distribution: Categorical) -> Rows:
    return Rows(*distribution)


def draw(keys: Array, distribution: Categorical) -> Array:
    """`distributions.sample`, by the kernels on CUDA where they support the case."""
    empty = Draft(jnp.zeros((distributions.shape_of(distribution)[0], 0), jnp.int32))
    if unsupported(empty, distribution) is not None or not is_worthwhile(distribution):
        return distributions.sample(keys, distribution)

    def by_kernel(keys: Array, distribution: Categorical) -> Array:
        return sample(jax.random.key_data(keys), _rows(distribution._replace(log_normalizer=None)))[0]

    return jax.lax.platform_dependent(keys, distribution, cuda=by_kernel, default=distributions.sample)
