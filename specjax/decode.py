"""The decoding loop: prefill, then steps that propose, score, verify and commit tokens, all on the device."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from specjax import metrics, proposers, scorers, verifiers
from specjax.decoding import log_probs, state_rows
from specjax.decoding.binding import as_pytree
from specjax.decoding.drafters import check_memory, commit_of, in_memory, propose
from specjax.decoding.log_probs import LogProbs
from specjax.keys import of_requests, positions
from specjax.pages import Pages, check_pages, check_pages_of_prompts, copy_to_rows, first_rows, one_page_a_row
from specjax.parallel import WHOLE, OnMesh, on_devices, shards
from specjax.parallel.loops import as_carry
from specjax.prompts import Fed, feed
from specjax.sampling import Sampling, guided, num_generated, process
from specjax.scorers.mqa import fed
from specjax.types import (
    NO_PAGE,
    Array,
    Categorical,
    Context,
    Draft,
    Memory,
    Model,
    Proposer,
    PyTree,
    Scorer,
    Verified,
    Verifier,
)
from specjax.validation import is_integer, is_traced
from specjax.verifiers import core

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
    num_drafts: Array  # [R] int32, number of draft tokens of the row
    num_accepted: Array  # [R] int32; at this index stands the recovered token, or the bonus token after all drafts
    log_probs: LogProbs | None = None  # of the committed tokens, fields [R, K+1, ...]; None if not asked for


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
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    rows = None if rows is None else jnp.asarray(rows)
    proposer = in_memory(proposer or proposers.none())
    check_memory(model, proposer)
    batch_size = _check_request(model, prompts, lengths, sampling, rows, max_length, num_logprobs, prompt_logprobs)
    if not (chunk_size is None or (is_integer(chunk_size) and chunk_size >= 1)):
        raise ValueError(f"chunk_size must be None or an integer >= 1, got {chunk_size!r}")
    if pages is not None:
        check_pages(model, proposer, pages, batch_size, max_length)
        check_pages_of_prompts(pages, prompts, lengths, rows)
    keys = of_requests(keys, batch_size)
    if isinstance(model.apply, OnMesh):
        model.apply.check_batch(batch_size)
        if rows is not None and model.apply.batch_axis is not None:  # rows of a prompt may be on different devices
            prompts, lengths, rows = prompts[rows], lengths[rows], None

    lengths = jnp.array(lengths, jnp.int32)
    prompt = Context(prompts.astype(jnp.int32), lengths, jnp.ones(lengths.shape, bool), lengths)
    buffer = None if num_logprobs is None else log_probs.zeros(batch_size, max_length, num_logprobs)
    (cache, proposer_state, filled), table = _feed_prompts(
        model, proposer, prompt, rows, pages, max_length, chunk_size, buffer if prompt_logprobs else None
    )
    tokens = jnp.zeros((prompts.shape[0], max_length), jnp.int32).at[:, : prompts.shape[1]].set(prompt.tokens)
    if rows is not None:
        tokens, lengths = tokens[rows], lengths[rows]
    full = lengths >= max_length
    guided_state = None if sampling.guide is None else jnp.copy(sampling.guide.initial)
    return State(  # the state is donated, so no array may stand in it twice
        context=Context(tokens, lengths, ~full, jnp.copy(lengths), guided_state, table),
        cache=cache,
        proposer=proposer_state,
        sampling=sampling,
        keys=keys,
        finished=jnp.where(full, BUFFER_FULL, RUNNING).astype(jnp.int32),
        totals=metrics.zeros(batch_size, proposer.num_draft_tokens),
        log_probs=filled if prompt_logprobs else buffer,
    )


def _feed_prompts(
    model: Model,
    proposer: Proposer,
    prompt: Context,
    rows: Array | None,
    pages: Pages | None,
    max_length: int,
    chunk_size: int | None,
    log_probs: LogProbs | None,
) -> tuple[Fed, Array | None]:
    """Feed N prompts; return the memories and log-probabilities of B rows, and the page table of these.

    A prompt is fed to the first of its rows. The other rows get copies of pages that they do not share.
    """
    num_prompts, width = prompt.tokens.shape
    batch_size = num_prompts if rows is None else rows.shape[0]
    table = None if pages is None else jnp.array(pages.table, jnp.int32)
    num_pages, page_size = (batch_size, max_length) if pages is None else pages.pool
    sizes = batch_size, num_pages, page_size
    memories = model.init_memory(*sizes), proposer.init_memory(*sizes)
    feed_rows = _feed_on_mesh if isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None else feed
    if rows is None:
        own = prompt._replace(pages=table)
        return feed_rows(model, proposer, own, *memories, chunk_size=chunk_size, log_probs=log_probs), table
    own = one_page_a_row(batch_size) if table is None else table
    first = first_rows(rows, num_prompts)
    prompt = prompt._replace(pages=own.at[first].get(mode="fill", fill_value=NO_PAGE))
    *memories, log_probs = feed(
        model, proposer, prompt, *memories, rows=first, chunk_size=chunk_size, log_probs=log_probs
    )
    num_copied = -(-width // page_size)
    cache, proposer_state = (copy_to_rows(memory, own, first[rows], num_copied) for memory in memories)
    return Fed(cache, proposer_state, jax.tree.map(lambda x: x[first[rows]], log_probs)), table


def _feed_on_mesh(
    model: Model,
    proposer: Proposer,
    prompt: Context,
    cache: Memory,
    proposer_state: Memory,
    *,
    chunk_size: int | None,
    log_probs: LogProbs | None,
) -> Fed:
    """Feed prompts on the devices that have their rows, as `feed` does."""

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, (prompt, proposer_state, log_probs) = operands
        given = model, proposer, prompt, cache, proposer_state
        cache, *rest = feed(*given, chunk_size=chunk_size, log_probs=log_probs)
        return cache, tuple(rest)

    rows, of_rows = (prompt, proposer_state, log_probs), model.apply.of_rows
    cache, rest = on_devices(model, one_device, cache, (proposer, rows), (WHOLE, of_rows), of_rows)
    return Fed(cache, *rest)


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
    """Return the number of rows B that the arguments of `prefill` describe; raise ValueError where they disagree."""
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(f"prompts must be int32 [B, W], got {prompts.dtype} {prompts.shape}")
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
        raise ValueError(f"sampling must be a Sampling, as sampling.batch returns, got {type(sampling).__name__}")
    if not 1 <= width <= max_length:
        raise ValueError(f"prompts must have a width in [1, max_length = {max_length}], got {width}")
    if model.max_length is not None and max_length > model.max_length:
        raise ValueError(f"max_length must be at most the model's {model.max_length}, got {max_length}")
    if prompt_logprobs and num_logprobs is None:
        raise ValueError("prompt_logprobs must be False where num_logprobs is None, got True")
    _check_prompts(prompts, lengths, model.vocab_size)
    _check_token_ids(sampling, model.vocab_size)
    batch_size = num_prompts if rows is None else _check_rows(rows, num_prompts)
    if sampling.max_tokens.shape != (batch_size,):
        raise ValueError(f"sampling must have {batch_size} rows, got max_tokens of shape {sampling.max_tokens.shape}")
    return batch_size


def _check_rows(rows: Array, num_prompts: int) -> int:
    """Return the number of rows; raise ValueError where one is not the index of a prompt."""
    if jnp.ndim(rows) != 1 or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        raise ValueError(f"rows must be int32 [B], got {jnp.result_type(rows)} {jnp.shape(rows)}")
    if not is_traced(rows) and not np.all((np.asarray(rows) >= 0) & (np.asarray(rows) < num_prompts)):
        raise ValueError(f"rows must be in [0, {num_prompts}), the number of prompts, got {np.asarray(rows).tolist()}")
    return len(rows)


def _check_prompts(prompts: Array, lengths: Array, vocab_size: int) -> None:
    """Raise ValueError for lengths or token ids out of range. Under jit they have no values, so nothing is checked."""
    if is_traced(prompts, lengths):
        return
    values, sizes = np.asarray(prompts), np.asarray(lengths)
    width = values.shape[1]
    if not ((sizes >= 1) & (sizes <= width)).all():
        raise ValueError(f"lengths must be in [1, W = {width}], got {sizes.tolist()}")
    ids = values[np.arange(width) < sizes[:, None]]
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"prompts must have token ids in [0, {vocab_size}), got {ids.min()} to {ids.max()}")


def _check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for token ids of the parameters outside the vocabulary, where they have values."""
    for name in ("stop_tokens", "bias_tokens", "allowed_tokens", "bad_words"):
        ids = getattr(sampling, name)
        if ids is not None and not is_traced(ids) and (largest := np.max(ids, initial=-1)) >= vocab_size:
            raise ValueError(f"sampling.{name} must have token ids in [0, {vocab_size}), got {largest}")


def step(
    model: Model,
    proposer: Proposer | None,
    state: State,
    *,
    rows: Array | None = None,
    verifier: Verifier = verifiers.rejection,
    scorer: Scorer = scorers.mqa,
    num_logprobs: int | None = None,
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

    Returns:
        The new state, and the record of the step.

    Raises:
        ValueError: the proposer makes more drafts than the one that the state was made with, `rows` are not integers
            [R] or given where devices share the rows, or a function returns something else than its protocol says.
            Outside jit also: a row is out of range, or stands twice.
    """
    proposer = in_memory(proposer or proposers.none())
    most = state.totals.drafted_at.shape[1]
    if proposer.num_draft_tokens > most:
        raise ValueError(
            f"proposer must be the one that the state was made with, with at most its {most} draft tokens, got "
            f"{proposer.num_draft_tokens}"
        )
    options: dict[str, Any] = {"verifier": verifier, "scorer": scorer, "num_logprobs": num_logprobs}
    if isinstance(model.apply, OnMesh):
        return _step_on_mesh(model, proposer, state, rows, options)
    if rows is not None:
        rows = state_rows.check(rows, state.context.length.shape[0])
        proposer = state_rows.take_temperatures(proposer, rows)
        part, info = step(model, proposer, state_rows.take(state, rows), **options)
        return state_rows.put(state, rows, part), info
    axis_name = model.axis_name
    context = _without_pages_of_ended_rows(state.context)
    keys = positions(state.keys, context.length, proposer.num_draft_tokens)
    given = keys, context, state.sampling, state.proposer, state.cache
    draft, proposer_state, cache = propose(model, proposer, *given)
    output, cache = scorer(model, context, draft, cache)
    target = process(state.sampling, output.logits, context, draft.tokens, axis_name=axis_name)
    shared: dict[str, Any] = {} if axis_name is None else {"axis_name": axis_name}
    verified = verifier(keys, shards.own_draft(draft, axis_name), target, **shared)
    if not isinstance(verified, Verified):
        raise ValueError(f"verifier must return a Verified, got {type(verified).__name__}")
    proposer_state = proposer.update(context, verified, output.features, proposer_state)
    cache, proposer_state = _keep(model, proposer, context, draft, verified, cache, proposer_state)

    num_drafts = _num_drafts(draft, context.active)
    new_context, tokens, finished = _commit(state, verified)
    outcomes = verified.is_accepted
    if outcomes is not None:
        outcomes = jnp.pad(outcomes, ((0, 0), (0, most - proposer.num_draft_tokens)))
    totals = metrics.update(
        state.totals,
        num_drafts,
        jnp.minimum(verified.num_accepted, num_drafts),
        new_context.length - context.length,
        context.active,
        outcomes,
    )
    buffer = state.log_probs
    if buffer is not None:
        slots = context.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        buffer = log_probs.record(buffer, slots, tokens, _reported(target), **shared)
    entries = None if num_logprobs is None else log_probs.logprobs(_reported(target), tokens, num_logprobs, **shared)
    state = state._replace(
        context=new_context,
        cache=cache,
        proposer=proposer_state,
        finished=finished,
        totals=totals,
        log_probs=buffer,
    )
    return state, Info(tokens, num_drafts, verified.num_accepted, entries)


def _step_on_mesh(
    model: Model, proposer: Proposer, state: State, rows: Array | None, options: dict[str, Any]
) -> tuple[State, Info]:
    """Step inside one `jax.shard_map`, so that kernels run on the parts and devices exchange only small arrays."""
    if rows is not None and model.apply.batch_axis is not None:
        raise ValueError(f"rows must be None where devices share the rows, along {model.apply.batch_axis!r}, got rows")
    functions = as_pytrees(options["verifier"], options["scorer"], None)

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, state, rows, (verifier, scorer) = operands
        own = options | {"verifier": verifier, "scorer": scorer}
        state, info = step(model, proposer, state._replace(cache=cache), rows=rows, **own)
        return state.cache, (state._replace(cache=None), info)

    model.apply.check_batch(state.context.length.shape[0])
    rest = state._replace(cache=None)
    specs = row_specs(rest, model.apply.of_rows)
    operands = proposer, rest, rows, functions
    given = operands, (WHOLE, specs, WHOLE, WHOLE), (specs, model.apply.of_rows)
    cache, (rest, info) = on_devices(model, one_device, state.cache, *given)
    return rest._replace(cache=cache), info


def _keep(
    model: Model,
    proposer: Any,
    context: Context,
    draft: Draft,
    verified: Verified,
    cache: Memory,
    proposer_state: Memory,
) -> tuple[Memory, Memory]:
    """Have target and proposer keep the pending token and the accepted drafts, where overwriting does not suffice."""
    commits = model.commit, commit_of(proposer)
    if commits == (None, None):
        return cache, proposer_state
    inputs = fed(context, draft)
    path = jnp.broadcast_to(jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32), inputs.tokens.shape)
    count = jnp.where(context.active, verified.num_accepted + 1, 0).astype(jnp.int32)
    memories = zip(commits, (cache, proposer_state), strict=True)
    cache, proposer_state = (
        memory if commit is None else commit(memory, inputs, path, count) for commit, memory in memories
    )
    return cache, proposer_state


def row_specs(state: State, of_rows: PartitionSpec) -> State:
    """Return how devices share the arrays of a state: `of_rows` those with a row for each sequence; the rest is whole.

    Grammars, and arrays that are bound to logits processors, serve all rows.
    """
    specs = jax.tree.map(lambda _: of_rows, state)
    guide, processors = specs.sampling.guide, specs.sampling.logits_processors
    if guide is not None:
        guide = guide._replace(token_classes=WHOLE, transitions=WHOLE)
    if processors is not None:
        processors = tuple((jax.tree.map(lambda _: WHOLE, function), rows) for function, rows in processors)
    return specs._replace(sampling=specs.sampling._replace(guide=guide, logits_processors=processors))


def _without_pages_of_ended_rows(context: Context) -> Context:
    """Return the context with no page for rows that are not active, whose pages may be another sequence's by now."""
    if context.pages is None:
        return context
    return context._replace(pages=jnp.where(context.active[:, None], context.pages, NO_PAGE))


def _reported(target: Categorical) -> Categorical:
    """Return the distribution whose log-probabilities are reported: the target's, with greedy rows at temperature 1."""
    if target.temperature is None:
        return target
    return target._replace(temperature=jnp.where(target.temperature > 0, target.temperature, 1))


def _num_drafts(draft: Draft, active: Array) -> Array:
    return jnp.where(active, core.num_drafts(core.canonical(draft)), 0)


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
    given = verified.num_accepted + 1 - is_empty.astype(jnp.int32)
    count = jnp.minimum(jnp.minimum(given, stop_count), jnp.minimum(left, room))
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
        ValueError: the verifier or scorer cannot be called, an option of the verifier or `max_steps` is out of its
            range, or `step` raises it.
    """
    limit = _step_limit(max_steps)
    changing, constant = _split(state)
    verifier, scorer = as_pytrees(verifier, scorer, proposer)
    return _generate(model, proposer, changing, constant, verifier, scorer, limit)


def _step_limit(max_steps: int | Array | None) -> Array:
    """Return the limit of steps [] int32. The value of an array, which may be traced, is not read."""
    most = jnp.iinfo(jnp.int32).max
    if max_steps is None:
        return jnp.int32(most)
    if isinstance(max_steps, jax.Array | np.ndarray):
        is_valid = max_steps.shape == () and jnp.issubdtype(max_steps.dtype, jnp.integer)
    else:
        is_valid = is_integer(max_steps) and 0 <= max_steps <= most
    if not is_valid:
        raise ValueError(f"max_steps must be None or an integer in [0, {most}], got {max_steps!r}")
    return jnp.asarray(max_steps, jnp.int32)


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
    verifier, scorer = as_pytrees(verifier, scorer, proposer)
    while bool(jnp.any(state.context.active)):
        changing, constant = _split(state)
        state, info = _step(model, proposer, changing, constant, verifier, scorer)
        yield info
    return state


def as_pytrees(verifier: Verifier, scorer: Scorer, proposer: Proposer | None) -> tuple[Partial, Partial]:
    """Return verifier and scorer as arguments of jit. Bound options, which have no values under jit, are checked."""
    if isinstance(verifier, Partial) and (check_options := getattr(verifier.func, "check_options", None)):
        check_options((proposer or proposers.none()).num_draft_tokens, **verifier.keywords)
    return as_pytree(verifier), as_pytree(scorer)


def _split(state: State) -> tuple[State, tuple[Sampling, Array]]:
    """Split a state into the part that steps change, which is donated, and the part that the caller may still use."""
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

    def is_running(carry):
        count, changing = carry
        return (count < max_steps) & jnp.any(changing.context.active)

    carry = as_carry(body, (0, changing), model.params, constant)
    return _join(jax.lax.while_loop(is_running, body, carry)[1], constant)
