"""The decoding loop: prefill, then steps of propose, score, verify and commit, all on the device."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax import keys as streams
from specjax import log_probs, metrics, proposers, scorers, verifiers
from specjax.binding import as_pytree
from specjax.log_probs import LogProbs
from specjax.prompts import feed
from specjax.sampling import Sampling, guided, num_generated, process
from specjax.types import (
    Array,
    Categorical,
    Context,
    Draft,
    Model,
    Proposer,
    PyTree,
    Scorer,
    Verified,
    Verifier,
    is_integer,
)

RUNNING, STOP, MAX_TOKENS, BUFFER_FULL = range(4)  # State.finished


class State(NamedTuple):
    """Everything that the next step needs, without any weights."""

    context: Context
    cache: PyTree  # the target's cache
    proposer: PyTree  # the proposer's state
    sampling: Sampling
    keys: Array  # [B] typed keys, one a request
    finished: Array  # [B] int32: RUNNING, or the reason why the row has ended
    totals: metrics.Totals
    log_probs: LogProbs | None = None  # fields [B, L], slot i for token i of the sequence; None if not asked for


class Info(NamedTuple):
    """The outcome of one step."""

    tokens: Array  # [B, K+1] int32, the committed tokens, then -1
    num_drafts: Array  # [B] int32, draft tokens of the row
    num_accepted: Array  # [B] int32; the token at this index is the bonus if this equals num_drafts, else recovered


def prefill(
    model: Model,
    proposer: Proposer | None,
    prompts: Array,
    lengths: Array,
    sampling: Sampling,
    keys: Array,
    *,
    max_length: int,
    rows: Array | None = None,
    num_logprobs: int | None = None,
    prompt_logprobs: bool = False,
) -> State:
    """Feed the prompts to target and proposer.

    Log-probabilities of generated tokens are those of the distribution that each token is drawn from, after penalties,
    masks, temperature and cut; greedy rows report this distribution at temperature 1. Log-probabilities of the prompt
    are the model's own, without any of these.

    Args:
        model: the target.
        proposer: None is plain decoding.
        prompts: [B, P] int32, right-padded.
        lengths: [B] int32, each >= 1.
        sampling: of the batch (`sampling.batch`).
        keys: one key a request [B], or one for all [].
        max_length: size of the token buffer, prompt and output.
        rows: [B] int32, the prompt of each row, where rows share prompts: these are fed once, prompts and lengths have
            a size of their own, and B is that of sampling. None: one prompt a row.
        num_logprobs: how many of the most likely tokens `State.log_probs` lists beside the chosen one, static; None
            collects no log-probabilities.
        prompt_logprobs: collect them for the prompt too, static.

    Returns:
        State. The last prompt token is fed by the first step.

    Raises:
        ValueError: for wrong shapes, a buffer smaller than the prompts or larger than the model's limit; and, outside
            jit, for lengths, token ids or rows out of range.
    """
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    batch_size = _check_request(model, prompts, lengths, sampling, rows, max_length, num_logprobs, prompt_logprobs)
    keys = _request_keys(keys, batch_size)
    proposer = proposer or proposers.none()
    num_prompts, width = prompts.shape

    lengths = jnp.array(lengths, jnp.int32)
    prompt = Context(prompts.astype(jnp.int32), lengths, jnp.ones(num_prompts, bool), lengths)
    buffer = None if num_logprobs is None else log_probs.zeros(num_prompts, max_length, num_logprobs)
    cache, filled = feed(model, prompt, model.init_cache(num_prompts, max_length), buffer if prompt_logprobs else None)
    proposer_state = proposer.prefill(prompt, None, proposer.init(num_prompts, max_length))
    tokens = jnp.zeros((num_prompts, max_length), jnp.int32).at[:, :width].set(prompt.tokens)
    fed = tokens, lengths, cache, proposer_state, filled if prompt_logprobs else buffer
    if rows is not None:
        fed = jax.tree.map(lambda x: x[jnp.asarray(rows)], fed)
    tokens, lengths, cache, proposer_state, buffer = fed
    full = lengths >= max_length
    guided_state = None if sampling.guide is None else jnp.copy(sampling.guide.initial)
    return State(  # no array twice: the state is donated
        context=Context(tokens, lengths, ~full, jnp.copy(lengths), guided_state),
        cache=cache,
        proposer=proposer_state,
        sampling=sampling,
        keys=keys,
        finished=jnp.where(full, BUFFER_FULL, RUNNING).astype(jnp.int32),
        totals=metrics.zeros(batch_size, proposer.num_draft_tokens),
        log_probs=buffer,
    )


def _check_request(
    model: Model,
    prompts: Array,
    lengths: Array,
    sampling: Sampling,
    rows: Array | None,
    max_length: int,
    num_logprobs: int | None,
    prompt_logprobs: bool,
) -> int:
    """The number of rows B that the arguments of `prefill` are for; ValueError where they do not fit."""
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(f"prompts must be int32 [B, P], got {prompts.dtype} {prompts.shape}")
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
        raise ValueError(f"sampling must be a Sampling, as of sampling.batch, got {type(sampling).__name__}")
    if not 1 <= width <= max_length:
        raise ValueError(f"prompts must have a width in [1, max_length = {max_length}], got {width}")
    if model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the model's {model.max_length}, got {max_length}")
    if prompt_logprobs and num_logprobs is None:
        raise ValueError("prompt_logprobs must be False where num_logprobs is None, got True")
    _check_prompts(prompts, lengths, model.vocab_size)
    batch_size = num_prompts if rows is None else _check_rows(rows, num_prompts)
    if sampling.max_tokens.shape != (batch_size,):
        raise ValueError(f"sampling must be of {batch_size} rows, got max_tokens {sampling.max_tokens.shape}")
    return batch_size


def _request_keys(keys: Array, batch_size: int) -> Array:
    """One key a request [B], from these or from one for all []."""
    streams.check(keys)
    if keys.shape == ():
        return streams.fold(keys, jnp.arange(batch_size))
    if keys.shape != (batch_size,):
        raise ValueError(f"keys must have shape [] or [B] = ({batch_size},), got {keys.shape}")
    return keys


def _check_rows(rows: Array, num_prompts: int) -> int:
    """The number of rows; ValueError where they do not name prompts."""
    if jnp.ndim(rows) != 1 or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        raise ValueError(f"rows must be int32 [B], got {jnp.result_type(rows)} {jnp.shape(rows)}")
    if not isinstance(rows, jax.core.Tracer) and not np.all((np.asarray(rows) >= 0) & (np.asarray(rows) < num_prompts)):
        raise ValueError(f"rows must be in [0, {num_prompts}), the number of prompts, got {np.asarray(rows).tolist()}")
    return len(rows)


def _check_prompts(prompts: Array, lengths: Array, vocab_size: int) -> None:
    """Raise ValueError for values out of range, where there are values: not under jit."""
    if isinstance(prompts, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    width = prompts.shape[1]
    if not ((lengths >= 1) & (lengths <= width)).all():
        raise ValueError(f"lengths must be in [1, P = {width}], got {lengths.tolist()}")
    ids = prompts[np.arange(width) < lengths[:, None]]
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"prompts must have token ids in [0, {vocab_size}), got {ids.min()} to {ids.max()}")


def step(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
) -> tuple[State, Info]:
    """Propose, score, verify and commit once: every active row gains between 1 and K+1 tokens.

    A row ends at the first stop token inside the accepted block, at its max_tokens, or at the end of the buffer;
    nothing after that is committed.
    """
    proposer = proposer or proposers.none()
    context = state.context
    keys = streams.positions(state.keys, context.length, proposer.num_draft_tokens)
    draft, proposer_state = proposer.propose(keys, context, state.sampling, state.proposer)
    output, cache = scorer(model, context, draft, state.cache)
    target = process(state.sampling, output.logits, context, draft.tokens)
    verified = verifier(keys, draft, target)
    proposer_state = proposer.update(context, verified, output.features, proposer_state)

    num_drafts = _num_drafts(draft, context.active)
    new_context, tokens, finished = _commit(state, verified)
    totals = metrics.update(
        state.totals,
        num_drafts,
        jnp.minimum(verified.num_accepted, num_drafts),
        new_context.length - context.length,
        context.active,
        verified.is_accepted,
    )
    buffer = state.log_probs
    if buffer is not None:
        slots = context.length[:, None] + jnp.arange(tokens.shape[1])[None]
        buffer = log_probs.record(buffer, slots, tokens, _reported(target))
    state = state._replace(
        context=new_context,
        cache=cache,
        proposer=proposer_state,
        finished=finished,
        totals=totals,
        log_probs=buffer,
    )
    return state, Info(tokens, num_drafts, verified.num_accepted)


def _reported(target: Categorical) -> Categorical:
    """The distribution whose log-probabilities are reported: that of the target, greedy rows at temperature 1."""
    if target.temperature is None:
        return target
    return target._replace(temperature=jnp.where(target.temperature > 0, target.temperature, 1))


def _num_drafts(draft: Draft, active: Array) -> Array:
    num_drafts = verifiers.canonical(draft).num_tokens
    return jnp.where(active, num_drafts, 0)


def _commit(state: State, verified: Verified) -> tuple[Context, Array, Array]:
    """Append what was verified, cut where the row ends: the context, the tokens committed [B, K+1], `finished`."""
    context, sampling = state.context, state.sampling
    batch_size, width = verified.tokens.shape
    buffer_size = context.tokens.shape[1]
    index = jnp.arange(width)[None]
    is_stop = jnp.zeros(verified.tokens.shape, bool)
    if sampling.stop_tokens is not None:
        is_stop = jnp.any(verified.tokens[:, :, None] == sampling.stop_tokens[:, None], axis=-1) & (
            verified.tokens >= 0
        )
    stop_count = jnp.min(jnp.where(is_stop, index + 1, width + 1), axis=1)  # tokens up to the first stop
    left = sampling.max_tokens - num_generated(context)
    room = buffer_size - context.length
    count = jnp.minimum(jnp.minimum(verified.num_accepted + 1, stop_count), jnp.minimum(left, room))
    count = jnp.where(context.active, count, 0).astype(jnp.int32)

    tokens = jnp.where(index < count[:, None], verified.tokens, -1)
    slot = jnp.where(tokens >= 0, context.length[:, None] + index, buffer_size)
    buffer = context.tokens.at[jnp.arange(batch_size)[:, None], slot].set(tokens, mode="drop")
    reason = jnp.where(
        count == stop_count,
        STOP,
        jnp.where(count == left, MAX_TOKENS, jnp.where(count == room, BUFFER_FULL, RUNNING)),
    )
    finished = jnp.where(context.active, reason, state.finished).astype(jnp.int32)
    guided_state = context.guided_state
    if guided_state is not None:
        guided_state = guided.advance(sampling.guide, guided_state, tokens)[:, -1]
    context = context._replace(
        tokens=buffer,
        length=context.length + count,
        active=context.active & (finished == RUNNING),
        guided_state=guided_state,
    )
    return context, tokens, finished


def deactivate(state: State, rows: Array) -> State:
    """End the rows [B] bool that are true, as by a stop."""
    rows = rows & state.context.active
    context = state.context._replace(active=state.context.active & ~rows)
    return state._replace(context=context, finished=jnp.where(rows, STOP, state.finished))


def generate(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    max_steps: int | None = None,
) -> State:
    """Step until every row has ended, or `max_steps` times, in one loop on the device. Donates `state`.

    The tokens of row b are state.context.tokens[b, : state.context.length[b]], its prompt first.
    """
    limit = jnp.asarray(jnp.iinfo(jnp.int32).max if max_steps is None else max_steps, jnp.int32)
    changing, constant = _split(state)
    verifier, scorer = _as_pytrees(verifier, scorer, proposer)
    return _generate(model, proposer, changing, constant, verifier, scorer, limit)


def stream(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
) -> Iterator[Info]:
    """Yield what each step did, until every row has ended. Donates `state`; the last one is the generator's value."""
    verifier, scorer = _as_pytrees(verifier, scorer, proposer)
    while bool(jnp.any(state.context.active)):
        changing, constant = _split(state)
        state, info = _step(model, proposer, changing, constant, verifier, scorer)
        yield info
    return state


def _as_pytrees(verifier: Verifier, scorer: Scorer, proposer: Proposer | None) -> tuple[Partial, Partial]:
    """Verifier and scorer as arguments of jit. Bound options are checked here: under jit they have no values."""
    if isinstance(verifier, Partial) and hasattr(verifier.func, "check_options"):
        verifier.func.check_options((proposer or proposers.none()).num_draft_tokens, **verifier.keywords)
    return as_pytree(verifier), as_pytree(scorer)


def _split(state: State) -> tuple[State, tuple[Sampling, Array]]:
    """Split a state into what steps change, which is donated, and what they only read, which may be the caller's."""
    return state._replace(sampling=None, keys=None), (state.sampling, state.keys)


def _join(changing: State, constant: tuple[Sampling, Array]) -> State:
    sampling, keys = constant
    return changing._replace(sampling=sampling, keys=keys)


@partial(jax.jit, donate_argnums=2)
def _step(model, proposer, changing, constant, verifier, scorer):
    return step(model, proposer, _join(changing, constant), verifier=verifier, scorer=scorer)


@partial(jax.jit, donate_argnums=2)
def _generate(model, proposer, changing, constant, verifier, scorer, max_steps):
    def body(carry):
        count, changing = carry
        state, _ = step(model, proposer, _join(changing, constant), verifier=verifier, scorer=scorer)
        return count + 1, _split(state)[0]

    def goes_on(carry):
        count, changing = carry
        return (count < max_steps) & jnp.any(changing.context.active)

    return _join(jax.lax.while_loop(goes_on, body, (0, changing))[1], constant)
