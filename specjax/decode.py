"""The decoding loop: prefill, then steps that propose, score, verify and commit tokens, all on the device."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import metrics, proposers, scorers, verifiers
from specjax.decoding import log_probs, state_rows, tree_steps
from specjax.decoding.binding import as_pytrees, of_draft
from specjax.decoding.checks import as_integers, check_num_draft_tokens, check_request, step_limit
from specjax.decoding.commits import keep
from specjax.decoding.compiling import compiled, gains_from_whole_sums, is_under_jit
from specjax.decoding.drafters import check_pair, in_memory, propose
from specjax.decoding.feeding import feed_prompts
from specjax.decoding.log_probs import LogProbs
from specjax.decoding.mixed_steps import beside
from specjax.decoding.ragged_steps import within
from specjax.distributions import sampled
from specjax.keys import of_requests, positions
from specjax.pages import Pages, check_pages, check_pages_of_prompts
from specjax.parallel import WHOLE, OnMesh, on_devices, shards
from specjax.parallel.links import links_in
from specjax.parallel.loops import as_carry
from specjax.sampling import Sampling, guided, num_generated
from specjax.types import (
    NO_PAGE,
    Array,
    Categorical,
    Context,
    Draft,
    DraftTree,
    Memory,
    Model,
    ModelInput,
    Proposer,
    PyTree,
    Scorer,
    Verified,
    Verifier,
)

RUNNING, STOP, MAX_TOKENS, BUFFER_FULL, NO_TOKEN = range(5)  # values of State.finished


class State(NamedTuple):
    """Everything that the next step needs, except the weights."""

    context: Context
    cache: Memory  # the target's
    proposer: Memory  # the proposer's
    sampling: Sampling
    keys: Array  # [B] typed keys, one for each request
    finished: Array  # [B] int32, RUNNING or the reason why the row has ended
    totals: metrics.Totals
    log_probs: LogProbs | None = None  # fields [B, L, ...], slot i for token i of the sequence; None if not asked for


class Info(NamedTuple):
    """The outcome of one step, of its R rows: all B of the state, or the given rows in their order."""

    tokens: Array  # [R, K+1] int32, the committed tokens, then -1
    num_drafts: Array  # [R] int32, number of draft tokens of the row; of a tree, the depth of its deepest node
    num_accepted: Array  # [R] int32; at this index stands the recovered token, or the bonus token after all drafts
    log_probs: LogProbs | None = None  # of the committed tokens, fields [R, K+1, ...]; None if not asked for
    features: Any = None  # the target's of the prompts beside the step, [1, C, ...]; None without any


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
    pages: Pages | None = None,
    chunk_size: int | None = None,
    num_logprobs: int | None = None,
    prompt_logprobs: bool = False,
) -> State:
    """Feed the prompts to the target and the proposer, and return the state before the first step.

    The log-probabilities of a generated token come from the distribution that the token is drawn from, after penalties,
    masks, temperature and cut; for greedy rows, from this distribution at temperature 1. The log-probability of a
    prompt token comes from the model's logits as they are.

    Args:
        model: the target.
        proposer: the proposer; None is plain decoding.
        prompts: [B, W] int32, right-padded.
        lengths: [B] int32, each >= 1.
        sampling: the sampling parameters of the batch, as `sampling.batch` returns them.
        keys: typed threefry keys, one for each request [B] or one for the batch [].
        max_length: L, the size of the token buffer, which holds prompt and output.
        rows: [B] int32, the index of each row's prompt. Rows may share a prompt, which is then fed once; `prompts` and
            `lengths` then have the number of prompts in place of B. None: row b has prompt b.
        pages: the table of the B rows, and the sizes of the pools that the caches of target and proposer are. Rows may
            share the pages that hold equal prompt tokens before the last two; each row needs other pages for the tokens
            after these. With `rows`, a prompt is fed through the pages of its first row, and its other rows get copies
            of pages that they do not share. None makes dense caches.
        chunk_size: the most tokens of a prompt in a call, static; None is 256, and up to 2048 for a few rows on a GPU.
        num_logprobs: how many of the most likely tokens `State.log_probs` lists beside the chosen one, static; None
            collects no log-probabilities.
        prompt_logprobs: whether to collect log-probabilities for the prompt too, static.

    Returns:
        State. The first step feeds the last prompt token.

    Raises:
        ValueError: an argument has a wrong shape or dtype, the buffer is smaller than the prompts or larger than the
            model's limit or than the table, the model or the proposer takes no pages, or the proposer writes the cache
            of a model with `commit`. Outside jit also: a length,
            row, page, or token id of prompts or parameters is out of range, or rows share a page that is not theirs to
            share.
    """
    prompts, lengths = as_integers("prompts", prompts, "[B, W]"), as_integers("lengths", lengths, "[B]")
    rows = None if rows is None else as_integers("rows", rows, "[B]")
    proposer = in_memory(proposer or proposers.none())
    check_pair(model, proposer)
    batch_size = check_request(
        model,
        prompts,
        lengths,
        sampling,
        rows=rows,
        max_length=max_length,
        chunk_size=chunk_size,
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if pages is not None:
        check_pages(model, proposer, pages, batch_size, max_length)
        check_pages_of_prompts(pages, prompts, lengths, rows)
    keys = of_requests(keys, batch_size)
    if isinstance(model.apply, OnMesh):
        model.apply.check_batch(batch_size)
        if rows is not None and model.apply.batch_axis is not None:  # rows of a prompt may be on different devices
            prompts, lengths, rows = prompts[rows], lengths[rows], None

    tokens, lengths = prompts.astype(jnp.int32), jnp.array(lengths, jnp.int32)
    prompt = Context(tokens, lengths, active=jnp.ones(lengths.shape, bool), prompt_length=lengths)
    buffer = None if num_logprobs is None else log_probs.zeros(batch_size, max_length, num_logprobs)
    fed, table = feed_prompts(
        model,
        proposer,
        prompt,
        rows=rows,
        pages=pages,
        max_length=max_length,
        chunk_size=chunk_size,
        log_probs=buffer if prompt_logprobs else None,
    )
    tokens = jnp.zeros((tokens.shape[0], max_length), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
    if rows is not None:
        tokens, lengths = tokens[rows], lengths[rows]
    is_full = lengths >= max_length
    return State(  # the state is donated, so no array may stand in it twice
        context=Context(
            tokens=tokens,
            length=lengths,
            active=~is_full,
            prompt_length=jnp.copy(lengths),
            guided_state=None if sampling.guide is None else jnp.copy(sampling.guide.initial),
            pages=table,
        ),
        cache=fed.cache,
        proposer=fed.proposer,
        sampling=sampling,
        keys=keys,
        finished=jnp.where(is_full, BUFFER_FULL, RUNNING).astype(jnp.int32),
        totals=metrics.zeros(batch_size, proposer.num_draft_tokens),
        log_probs=fed.log_probs if prompt_logprobs else buffer,
    )


def step(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    rows: Array | None = None,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    num_logprobs: int | None = None,
    prompts: ModelInput | None = None,
) -> tuple[State, Info]:
    """Propose, score, verify and commit once, which gives every active row between 1 and K+1 tokens.

    A row ends at the first stop token among the verified tokens, at its `max_tokens`, or at the end of the buffer. No
    token after the end is committed. It also ends, by `NO_TOKEN`, before a place for which no token counts: the model
    gave no finite logit there, or the masks of the request leave none.

    Args:
        model: the target.
        proposer: the proposer that the state was made with; None is plain decoding.
        state: the state, from `prefill` or an earlier step.
        rows: [R] int32, the rows that the step computes, no row twice; B, the number of rows, stands for none. The step
            costs as much as a step of a batch of R rows, and the other rows stay as they are. None computes all rows.
        verifier: a verifier of `specjax.verifiers` or your own, with its options bound by `jax.tree_util.Partial`.
        scorer: a scorer of `specjax.scorers` or your own.
        num_logprobs: how many of the most likely tokens `Info.log_probs` lists beside each committed one, static; None
            reports no log-probabilities.
        prompts: a packed call, with the pages of other rows, that the target runs in the same call as the step; the
            proposer does not get it. It needs a model with `takes_groups`, and `scorers.mqa`.

    Returns:
        The new state, and the record of the step.

    Raises:
        ValueError: `state` is none, the proposer makes more drafts than the one that it was made with, `rows` are not
            integers [R] or given where devices share the rows, the target cannot run `prompts` beside a step, or a
            function returns something else than its protocol says. Outside jit also: a row is out of range, or stands
            twice.
    """
    _check_state(state)
    proposer = in_memory(proposer or proposers.none())
    check_num_draft_tokens(proposer, state.totals.drafted_at.shape[1])
    options: Any = {"verifier": verifier, "scorer": scorer, "num_logprobs": num_logprobs, "prompts": prompts}
    if isinstance(model.apply, OnMesh):
        return _step_on_mesh(model, proposer, state, rows, **options)
    if rows is not None:
        return _step_in_rows(model, proposer, state, rows, **options)

    context = _without_pages_of_ended_rows(state.context)
    keys = positions(state.keys, context.length, proposer.num_draft_tokens)
    draft, proposer_state, cache = propose(
        model, proposer, keys, context, state.sampling, state.proposer, memory=state.cache
    )
    draft: Any = tree_steps.fit(context, draft)
    called = within(model, proposer, draft) if prompts is None else beside(model, prompts)
    output, cache = scorer(called, context, draft, cache)
    features, of_prompts = (output.features, None) if prompts is None else output.features
    width = proposer.num_draft_tokens
    target = tree_steps.process(state.sampling, output.logits, context, draft, width, axis_name=model.axis_name)
    verified = _verify(of_draft(verifier, draft), keys, draft, target, model)
    features, target = tree_steps.of_path(features, target, verified)
    proposer_state = proposer.update(context, verified, features, proposer_state)
    cache, proposer_state = keep(model, proposer, context, draft, verified, cache, proposer_state)
    new_context, tokens, finished = _commit(state, verified)
    state = state._replace(context=new_context, cache=cache, proposer=proposer_state, finished=finished)
    state, info = _account(state, context, draft, target, verified, tokens, num_logprobs, model.axis_name)
    return state, info._replace(features=of_prompts)


def _step_in_rows(model: Model, proposer: Proposer, state: State, rows: Array, **options: Any) -> tuple[State, Info]:
    """Step as a batch of the given rows does."""
    rows = state_rows.check(rows, state.context.length.shape[0])
    part, info = step(model, state_rows.take_temperatures(proposer, rows), state_rows.take(state, rows), **options)
    return state_rows.put(state, rows, part), info


def _step_on_mesh(
    model: Model,
    proposer: Proposer,
    state: State,
    rows: Array | None,
    *,
    verifier: Verifier,
    scorer: Scorer,
    num_logprobs: int | None,
    prompts: ModelInput | None,
) -> tuple[State, Info]:
    """Step inside one `jax.shard_map`, so that kernels run on the parts and devices exchange only small arrays."""
    if rows is not None and model.apply.batch_axis is not None:
        raise ValueError(f"rows must be None where devices share the rows, along {model.apply.batch_axis!r}, got rows")

    # A tree is scored on slots. Where devices share the rows, these hold them.
    has_slots = model.apply.has_slots and getattr(proposer, "tree", None) is not None

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, state, rows, prompts, (verifier, scorer) = operands
        if has_slots:
            model, cache = replace(model, takes_pages=True), Memory(pools=cache.rows)
        state, info = step(
            model,
            proposer,
            state._replace(cache=cache),
            rows=rows,
            verifier=verifier,
            scorer=scorer,
            num_logprobs=num_logprobs,
            prompts=prompts,
        )
        cache = Memory(rows=state.cache.pools) if has_slots else state.cache
        return cache, (state._replace(cache=None), info)

    model.apply.check_batch(state.context.length.shape[0])
    rest = state._replace(cache=None)
    specs = state_rows.specs(rest, model.apply.of_rows)
    cache, (rest, info) = on_devices(
        model,
        one_device,
        state.cache,
        operands=(proposer, rest, rows, prompts, as_pytrees(verifier, scorer, proposer)),
        specs=(WHOLE, specs, WHOLE, WHOLE, WHOLE),
        out=(specs, model.apply.of_rows),
    )
    return rest._replace(cache=cache), info


def _verify(verifier: Verifier, keys: Array, draft: Any, target: Categorical, model: Model) -> Verified:
    """Call a verifier, which need not know of axes where devices have the whole vocabulary."""
    axis_name = model.axis_name
    if axis_name is None:
        verified = verifier(keys, draft, target)
    else:
        target = target._replace(links=links_in(model.params))
        verified = verifier(keys, shards.own_draft(draft, axis_name), target, axis_name=axis_name)
    if not isinstance(verified, Verified):
        raise ValueError(f"verifier must return a Verified, got {type(verified).__name__}")
    return verified


def _without_pages_of_ended_rows(context: Context) -> Context:
    """Return the context with no page for rows that are not active, whose pages may be another sequence's by now."""
    if context.pages is None:
        return context
    return context._replace(pages=jnp.where(context.active[:, None], context.pages, NO_PAGE))


def _commit(state: State, verified: Verified) -> tuple[Context, Array, Array]:
    """Append the verified tokens up to the end of each row.

    Returns:
        The new context, the committed tokens [B, K+1], then -1, and the new `State.finished`.
    """
    context, sampling = state.context, state.sampling
    batch_size, width = verified.tokens.shape
    buffer_size = context.tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None]
    is_stop = jnp.zeros(verified.tokens.shape, bool)
    if sampling.stop_tokens is not None:
        is_stop = jnp.any(verified.tokens[:, :, None] == sampling.stop_tokens[:, None], axis=-1) & (
            verified.tokens >= 0
        )
    stop_count = jnp.min(jnp.where(is_stop, index + 1, width + 1), axis=1)  # tokens up to and with the first stop token
    left = sampling.max_tokens - num_generated(context)
    room = buffer_size - context.length
    is_empty = jnp.zeros_like(context.active) if verified.is_empty is None else verified.is_empty
    num_verified = verified.num_accepted + 1 - is_empty.astype(jnp.int32)
    count = jnp.minimum(jnp.minimum(num_verified, stop_count), jnp.minimum(left, room))
    count = jnp.where(context.active, count, 0).astype(jnp.int32)

    tokens = jnp.where(index < count[:, None], verified.tokens, -1)
    slot = jnp.where(tokens >= 0, context.length[:, None] + index, buffer_size)
    buffer = context.tokens.at[jnp.arange(batch_size)[:, None], slot].set(tokens, mode="drop")
    reason = jnp.where(is_empty, NO_TOKEN, RUNNING)
    for is_end, why in ((count == room, BUFFER_FULL), (count == left, MAX_TOKENS), (count == stop_count, STOP)):
        reason = jnp.where(is_end, why, reason)
    finished = jnp.where(context.active, reason, state.finished).astype(jnp.int32)
    guided_state = context.guided_state
    if guided_state is not None and sampling.guide is not None:
        guided_state = guided.advance(sampling.guide, guided_state, tokens)[:, -1]
    context = context._replace(
        tokens=buffer,
        length=context.length + count,
        active=context.active & (finished == RUNNING),
        guided_state=guided_state,
    )
    return context, tokens, finished


def _account(
    state: State,
    before: Context,
    draft: Draft | DraftTree,
    target: Categorical,
    verified: Verified,
    tokens: Array,
    num_logprobs: int | None,
    axis_name: str | None,
) -> tuple[State, Info]:
    """Count the drafts of a step, and record the log-probabilities of its tokens.

    Args:
        state: the state after the step, with the totals and log-probabilities before it.
        before: the context before the step.
        draft: the draft of the step.
        target: the target's distributions, [B, K+1, V].
        verified: the verdict on the draft.
        tokens: [B, K+1] int32, the committed tokens, then -1.
        num_logprobs: as in `step`.
        axis_name: the axis of devices that share the vocabulary.

    Returns:
        The state with the new totals and log-probabilities, and the report of the step.
    """
    num_drafts = jnp.where(before.active, tree_steps.num_drafts(draft), 0)
    outcomes = verified.is_accepted
    if outcomes is not None:
        most = state.totals.drafted_at.shape[1]
        outcomes = jnp.pad(outcomes, ((0, 0), (0, most - outcomes.shape[1])))
    totals = metrics.update(
        state.totals,
        num_drafts=num_drafts,
        num_accepted=jnp.minimum(verified.num_accepted, num_drafts),
        num_emitted=state.context.length - before.length,
        active=before.active,
        is_accepted=outcomes,
    )
    buffer, entries = state.log_probs, None
    if buffer is not None:
        slots = before.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        buffer = log_probs.record(buffer, slots, tokens, sampled(target), axis_name=axis_name)
    if num_logprobs is not None:
        entries = log_probs.logprobs(sampled(target), tokens, num_logprobs, axis_name=axis_name)
    info = Info(tokens, num_drafts, num_accepted=verified.num_accepted, log_probs=entries)
    return state._replace(totals=totals, log_probs=buffer), info


def deactivate(state: State, rows: Array) -> State:
    """End the rows that are true in `rows` [B] bool, with the reason STOP."""
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
    max_steps: int | Array | None = None,
) -> State:
    """Step until every row has ended, in one loop on the device. `state` is donated: do not use it again.

    Args:
        model: the target.
        proposer: the proposer that the state was made with; None is plain decoding.
        state: the state, from `prefill` or earlier steps.
        verifier: a verifier of `specjax.verifiers` or your own, with its options bound by `jax.tree_util.Partial`.
        scorer: a scorer of `specjax.scorers` or your own.
        max_steps: the most steps to take, an integer >= 0 or an integer array []; None is no limit.

    Returns:
        The last state. The tokens of row b are `state.context.tokens[b, : state.context.length[b]]`, prompt first.

    Raises:
        ValueError: `state` is none, the verifier or scorer cannot be called, an option of the verifier or `max_steps`
            is out of its range, or `step` raises it.
    """
    limit = step_limit(max_steps)
    _check_state(state)
    verifier, scorer = as_pytrees(verifier, scorer, proposer)
    function = _generate.usual
    if not is_under_jit() and gains_from_whole_sums(model):
        batch_size, num_drafts = len(state.keys), 0 if proposer is None else proposer.num_draft_tokens
        function = _generate.for_rows(batch_size, batch_size * (1 + num_drafts))
    return function(model, proposer, _progress(state), state.sampling, state.keys, verifier, scorer, limit)


def stream(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
) -> Iterator[Info]:
    """Yield the record of each step, until every row has ended. `state` is donated: do not use it again.

    `generate` describes the arguments. The generator's return value is the last state.
    """
    _check_state(state)
    verifier, scorer = as_pytrees(verifier, scorer, proposer)
    while bool(jnp.any(state.context.active)):
        state, info = _step(model, proposer, _progress(state), state.sampling, state.keys, verifier, scorer)
        yield info
    return state


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise ValueError(f"state must be a State, as prefill returns it, got {type(state).__name__}")


def _progress(state: State) -> State:
    """Return the part of a state that steps change, which is donated. The caller may still use the other two fields."""
    return state._replace(sampling=None, keys=None)


@partial(jax.jit, donate_argnums=2)
def _step(model, proposer, progress, sampling, keys, verifier, scorer):
    state = progress._replace(sampling=sampling, keys=keys)
    return step(model, proposer, state, verifier=verifier, scorer=scorer)


def _until_the_end(model, proposer, progress, sampling, keys, verifier, scorer, max_steps):
    def body(carry):
        count, progress = carry
        state = progress._replace(sampling=sampling, keys=keys)
        state, _ = step(model, proposer, state, verifier=verifier, scorer=scorer)
        return count + 1, _progress(state)

    def is_running(carry):
        count, progress = carry
        return (count < max_steps) & jnp.any(progress.context.active)

    carry = as_carry(body, (0, progress), model.params, (sampling, keys))
    _, progress = jax.lax.while_loop(is_running, body, carry)
    return progress._replace(sampling=sampling, keys=keys)


_generate = compiled(_until_the_end, donate_argnums=2)
