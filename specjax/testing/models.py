"""A verdict on a model, which says whether it keeps the contract of `specjax.types.Model`."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.calls import check_result
from specjax.testing.packed import logits_of_pieces, logits_of_ragged_step
from specjax.testing.recurrent import check_states
from specjax.types import Model, ModelInput, ModelOutput, PyTree
from specjax.validation import is_integer

BATCH_SIZE, NUM_TOKENS, CHUNK = 3, 12, 4  # the cache has NUM_TOKENS slots; a call feeds all tokens, CHUNK or one
PAGE_SIZE, NUM_PAGES = 4, 20  # of a pool, of which the rows have NUM_TOKENS / PAGE_SIZE pages each
FAR = 2**16  # the slots of a long cache, whose shape alone is computed
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05
SLOT_BY_SLOT = "keep one state a slot, as docs/own-models.md shows"


def assert_model(model: Model, *, tolerance: float | None = None) -> None:
    """Raise AssertionError unless a model keeps the contract that decoding relies on.

    The model is run on a few random tokens. One call over all of them gives the expected logits. The calls that a
    decoding loop makes must give the same logits: chunks, rows at different lengths, padded prompts, tokens that are
    fed again, rejected drafts that are overwritten, calls that pass the end of the cache, trees if the model reads
    `ModelInput.mask`, a pool of pages if it takes pages, and packed and ragged calls if it takes these. A model with
    `commit` gets other calls: after each of them its state must be the state of plain decoding, whatever the calls
    before kept.
    Matrices are multiplied with precision "highest" for these calls, so that rounding is not taken for a mistake.

    Args:
        model: the model, with or without a cache; its `max_length` is None or at least 12.
        tolerance: the largest difference of two logits that counts as rounding, relative to the largest logit. None
            is 1e-4, or 0.05 if parameters, cache or logits have 16 bits. This larger tolerance hides small mistakes, so
            check the model with float32 parameters if you can.

    Raises:
        AssertionError: the model breaks the contract. The message says which promise is broken, at which row and
            position and by how much, and the remedy.
        ValueError: `model` is not a `Model`, or its `max_length` is too short for the check.

    Example:
        >>> from specjax.testing import bigram_model
        >>> assert_model(bigram_model(jax.random.normal(jax.random.key(0), (5, 5))))
    """
    if not isinstance(model, Model):
        raise ValueError(f"model must be a Model, got {type(model).__name__}")
    if model.init_rows is not None and model.commit is None:
        raise ValueError("model must have commit to be checked, as it keeps more than slots: its init_rows is not None")
    if model.commit is not None:
        with jax.default_matmul_precision("highest"):
            check_states(model, _rounding(model) if tolerance is None else tolerance)
        _check_closure(model)
        _check_identity(model)
        return
    if model.max_length is not None and model.max_length < NUM_TOKENS:
        raise ValueError(f"max_length of the model must be None or at least {NUM_TOKENS}, got {model.max_length}")
    _check_forms(model)
    with jax.default_matmul_precision("highest"):
        trial = _start(model, tolerance)
        _check_order(trial)
        _check_rows(trial)
        _check_unseen_slots(trial)
        _check_chunks(trial)
        _check_rejected_drafts(trial)
        _check_tokens_fed_again(trial)
        _check_padded_prompts(trial)
        _check_end_of_cache(trial)
        _check_tree(trial)
        if model.takes_pages:
            _check_pages(trial)
        if model.takes_pages and model.takes_groups:
            _check_packed_calls(trial)
        if model.takes_pages and model.takes_groups and model.takes_ragged:
            _check_ragged_calls(trial)
    _check_closure(model)
    _check_identity(model)


class _Promise(NamedTuple):
    """A sentence of the contract, and the advice for a model that breaks it."""

    text: str
    remedy: str


class _Trial(NamedTuple):
    """A model, the tokens that it is run on, and the logits of one call over all of these tokens."""

    model: Model
    tokens: np.ndarray  # [B, N] int32
    others: np.ndarray  # [B, N] int32, each different from the token in `tokens`
    expected: np.ndarray  # [B, N, V] logits
    tolerance: float
    pages: np.ndarray | None = None  # [B, P] int32 the page table; None is a dense cache

    def new_cache(self) -> PyTree:
        return self.model.init_cache(*(BATCH_SIZE, NUM_TOKENS) if self.pages is None else (NUM_PAGES, PAGE_SIZE))

    def feed(self, tokens: np.ndarray, starts: int | np.ndarray, cache: PyTree) -> tuple[np.ndarray, PyTree]:
        """Feed tokens [B, T] from the positions `starts`, [] or [B], on; return logits [B, T, V] and the new cache."""
        return _feed(self.model, tokens, _positions(starts, *tokens.shape), cache, pages=self.pages)

    def run(self, promise: _Promise, calls: list[tuple[int, int]], cache: PyTree) -> PyTree:
        """Feed the tokens in calls of (start, number of tokens), compare the logits of each, and return the cache."""
        for start, num_tokens in calls:
            logits, cache = self.feed(self.tokens[:, start : start + num_tokens], start, cache)
            self.compare(promise, logits, start)
        return cache

    def compare(
        self, promise: _Promise, logits: np.ndarray, starts: int | np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        """Raise AssertionError if logits [B, T, V] are not those expected of `rows` from the positions `starts` on."""
        rows = np.arange(BATCH_SIZE) if rows is None else rows
        positions = _positions(starts, len(rows), logits.shape[1])
        expected = self.expected[rows[:, None], np.minimum(positions, NUM_TOKENS - 1)]
        exists = positions < NUM_TOKENS
        difference = np.where(exists, _difference(logits, expected) / _scale(self.expected), 0)
        is_wrong = difference > self.tolerance
        if is_wrong.any():
            t, b = np.argwhere(is_wrong.T)[0]  # the first token that is wrong in any row
            place = f"at row {rows[b]}, position {positions[b, t]}"
            if np.isnan(logits[b, t]).any():
                what = f"{place} a logit is NaN"
            else:
                what = (
                    f"{place} a logit is off by {difference[b, t]:.2g} of the largest logit, where rounding may be "
                    f"{self.tolerance:g}"
                )
            cause = _likely_cause(self) if self.pages is None else None
            raise AssertionError(f"{promise.text}: {what}. {cause or promise.remedy}.")


@jax.jit
def _call(model: Model, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    return model.apply(model.params, inputs, cache)


def _feed(
    model: Model,
    tokens: np.ndarray,
    positions: np.ndarray,
    cache: PyTree,
    mask: np.ndarray | None = None,
    pages: np.ndarray | None = None,
) -> tuple[np.ndarray, PyTree]:
    output, cache = _call(model, ModelInput(*jax.tree.map(jnp.asarray, (tokens, positions, mask, pages))), cache)
    return np.asarray(output.logits, np.float64), cache


def _positions(starts: int | np.ndarray, batch_size: int, num_tokens: int) -> np.ndarray:
    """Return positions [B, T] int32, which count up from one number or from numbers [B]."""
    return (np.broadcast_to(starts, batch_size)[:, None] + np.arange(num_tokens)).astype(np.int32)


def _difference(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the largest difference [B, T] of logits [B, T, V] over V; infinite where one is NaN or only one finite."""
    with np.errstate(invalid="ignore"):
        difference = np.where(logits == expected, 0, np.abs(logits - expected))
    return np.max(np.where(np.isnan(difference), np.inf, difference), axis=-1)


def _scale(logits: np.ndarray) -> float:
    """Return the largest absolute value of a finite logit, or 1 if all are 0."""
    return np.max(np.abs(logits), where=np.isfinite(logits), initial=0) or 1.0


def _start(model: Model, tolerance: float | None) -> _Trial:
    """Make tokens and run the model over them in one call."""
    rng = np.random.default_rng(0)
    shape = BATCH_SIZE, NUM_TOKENS
    tokens = rng.integers(0, model.vocab_size, shape, dtype=np.int32)
    others = (tokens + rng.integers(1, max(2, model.vocab_size), shape, dtype=np.int32)) % model.vocab_size
    cache = model.init_cache(BATCH_SIZE, NUM_TOKENS)
    logits, _ = _feed(model, tokens, _positions(0, *shape), cache)
    if tolerance is None:
        output, _ = jax.eval_shape(_call, model, _inputs(*shape), cache)
        dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves((model.params, cache, output.logits))}
        tolerance = _tolerance(dtypes)
    trial = _Trial(model, tokens, others, logits, tolerance)
    is_number = np.isfinite(logits) | np.isneginf(logits)
    if not is_number.all():
        b, t, v = np.argwhere(~is_number)[0]
        raise AssertionError(
            f"logits must be finite or -inf: one call over {NUM_TOKENS} tokens gives {logits[b, t, v]} at row {b}, "
            f"position {t}, token {v}. {_likely_cause(trial) or 'Look for a division by 0 in apply'}."
        )
    return trial


def _tolerance(dtypes: Iterable[Any]) -> float:
    is_half = any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2 for dtype in dtypes)
    return HALF_TOLERANCE if is_half else TOLERANCE


def _rounding(model: Model) -> float:
    """Return the tolerance for a model with `commit`, by the dtypes of its parameters."""
    return _tolerance({jnp.result_type(leaf) for leaf in jax.tree.leaves(model.params)})


def _inputs(batch_size: int, num_tokens: int) -> ModelInput:
    """Return the shapes of the inputs of a call."""
    return jax.eval_shape(lambda: ModelInput(tokens := jnp.zeros((batch_size, num_tokens), jnp.int32), tokens))


def _check_forms(model: Model) -> None:
    """Raise AssertionError for faults that shapes, dtypes and types alone show."""
    for name in ("apply", "init_cache"):
        try:
            hash(getattr(model, name))
        except TypeError as error:
            raise AssertionError(
                f"{name} must be hashable, for it is a static field of a pytree, got {getattr(model, name)!r}: use a "
                "module-level function or a frozen dataclass with __call__"
            ) from error
    if not is_integer(model.vocab_size) or model.vocab_size < 1:
        raise AssertionError(f"vocab_size must be an integer >= 1, got {model.vocab_size!r}")
    for batch_size in (2, 3):
        for path, leaf in _cache_leaves(model, batch_size, NUM_TOKENS):
            if leaf.shape[:1] != (batch_size,):
                raise AssertionError(
                    f"every leaf of the cache must have the batch as its leading axis: init_cache({batch_size}, "
                    f"{NUM_TOKENS}) gives cache{path} of shape {leaf.shape}. Put other axes, as that of the layers, "
                    "after it, or make a list of them"
                )
            if model.takes_pages and leaf.shape[:2] != (batch_size, NUM_TOKENS):
                raise AssertionError(
                    f"every leaf of a cache in pages must be [num_pages, page_size, ...]: init_cache({batch_size}, "
                    f"{NUM_TOKENS}) gives cache{path} of shape {leaf.shape}. Put other axes, as that of the heads, "
                    "after these two, or set takes_pages to False"
                )
    _check_every_token_has_a_slot(model)
    for batch_size, num_tokens in ((BATCH_SIZE, CHUNK), (1, 1)):
        cache = jax.eval_shape(lambda size=batch_size: model.init_cache(size, NUM_TOKENS))
        try:
            jax.eval_shape(partial(_checked, model), model.params, _inputs(batch_size, num_tokens), cache)
        except jax.errors.JAXTypeError as error:
            raise AssertionError(
                "apply must be a pure function of traced arrays, and it asks for the value of one: positions, tokens "
                "and the cache have none under jit. Use jnp.where, jnp.take_along_axis and .at[] instead"
            ) from error


def _cache_leaves(model: Model, batch_size: int, max_length: int) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    cache = jax.eval_shape(lambda: model.init_cache(batch_size, max_length))
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(cache)]


def _checked(model: Model, params: PyTree, inputs: ModelInput, cache: PyTree) -> None:
    result = model.apply(params, inputs, cache)
    try:
        check_result(model, inputs, cache, result)
    except ValueError as error:
        raise AssertionError(str(error)) from error


def _check_every_token_has_a_slot(model: Model) -> None:
    """Raise AssertionError for a ring buffer, whose slots grow with max_length only up to a limit."""
    far = FAR if model.max_length is None else model.max_length
    sizes = (NUM_TOKENS // 2, NUM_TOKENS, far // 2, far)
    for leaves in zip(*(_cache_leaves(model, 1, size) for size in sizes), strict=True):
        shapes = [leaf.shape for _, leaf in leaves]
        if shapes[0] != shapes[1] and shapes[2] == shapes[3]:
            raise AssertionError(
                f"every token must have a slot of its own: init_cache gives cache{leaves[0][0]} of shape {shapes[2]} "
                f"for a max_length of {sizes[2]} and of {sizes[3]}. In a ring buffer a rejected draft overwrites a "
                "token that is needed again: give every position a slot, and mask what is outside the window"
            )


def _check_order(trial: _Trial) -> None:
    promise = _Promise(
        "a token must not see those after it in its call",
        "Attend to slots up to positions[:, 0] + the index of the token in the call",
    )
    half = NUM_TOKENS // 2
    changed = np.concatenate([trial.tokens[:, :half], trial.others[:, half:]], axis=1)
    trial.compare(promise, trial.feed(changed, 0, trial.new_cache())[0][:, :half], 0)


def _check_rows(trial: _Trial) -> None:
    promise = _Promise(
        "a row must not depend on the other rows of its batch, nor on how many they are",
        "Compute nothing across the leading axis, and index arrays with the row, as in cache[row, slot]",
    )
    rows = np.array([1])
    changed = np.where(np.arange(BATCH_SIZE)[:, None] == rows, trial.tokens, trial.others)
    trial.compare(promise, trial.feed(changed, 0, trial.new_cache())[0][rows], 0, rows)
    alone = trial.model.init_cache(1, NUM_TOKENS)
    trial.compare(promise, trial.feed(trial.tokens[rows], 0, alone)[0], 0, rows)


def _check_unseen_slots(trial: _Trial) -> None:
    promise = _Promise(
        "a call must overwrite the slots positions[:, 0] + arange(T), and its tokens must not see later ones, which "
        "hold rejected drafts or padding",
        "Write with .at[row, slot].set(..., mode='drop') and let no token see a slot after its own",
    )
    _, cache = trial.feed(trial.others, 0, trial.new_cache())
    trial.run(promise, [(0, CHUNK)], cache)


def _check_chunks(trial: _Trial) -> None:
    promise = _Promise(
        "tokens that are fed in several calls must give the logits of one call over all of them",
        "Let a token see every slot before positions[:, 0], and count positions by inputs.positions, not from 0",
    )
    for sizes in ([CHUNK] * (NUM_TOKENS // CHUNK), [1] * NUM_TOKENS, [1, CHUNK, 1, CHUNK, 1, 1]):
        trial.run(promise, [(sum(sizes[:i]), size) for i, size in enumerate(sizes)], trial.new_cache())
    promise = _Promise(
        "rows of the cache must be those of the batch, whatever their order",
        "Let the leading axis of every leaf be the batch, and keep nothing in a leaf that names a row",
    )
    order = np.array([2, 0, 1])
    _, cache = trial.feed(trial.tokens[:, :CHUNK], 0, trial.new_cache())
    cache = jax.tree.map(lambda leaf: leaf[order], cache)
    trial.compare(promise, trial.feed(trial.tokens[order, CHUNK : 2 * CHUNK], CHUNK, cache)[0], CHUNK, order)


def _check_rejected_drafts(trial: _Trial) -> None:
    promise = _Promise(
        "what rejected drafts left in the cache must be overwritten by the tokens that are fed to their slots",
        f"Let a call depend on the slots before positions[:, 0] alone, not on what was fed last: {SLOT_BY_SLOT}",
    )
    cache = trial.run(promise, [(0, CHUNK)], trial.new_cache())
    _, cache = trial.feed(trial.others[:, CHUNK : 2 * CHUNK], CHUNK, cache)
    cache = trial.run(promise, [(CHUNK, 1), (CHUNK + 1, CHUNK)], cache)
    last = 2 * CHUNK + 1
    _, cache = trial.feed(trial.others[:, last : last + 1], last, cache)
    trial.run(promise, [(position, 1) for position in range(last, NUM_TOKENS)], cache)


def _check_tokens_fed_again(trial: _Trial) -> None:
    promise = _Promise(
        "tokens that are fed again, as each step does with the last one and a draft model with the last two, must "
        "change nothing",
        f"A call may begin at any slot that has been written, inside an earlier call too: {SLOT_BY_SLOT}",
    )
    trial.run(promise, [(0, CHUNK), (CHUNK, CHUNK), (6, CHUNK), (9, 1), (8, CHUNK)], trial.new_cache())


def _check_padded_prompts(trial: _Trial) -> None:
    promise = _Promise(
        "padding after a prompt must not matter, and every row must go on from its own length",
        "Read the start of each row, positions[:, 0], and neither that of the first row nor a length of your own",
    )
    lengths = np.array([3, 8, 5])
    padded = np.where(np.arange(NUM_TOKENS) < lengths[:, None], trial.tokens, 0)
    _, cache = trial.feed(padded, 0, trial.new_cache())
    for starts, num_tokens in ((lengths - 1, 1), (lengths - 1, CHUNK)):
        columns = _positions(starts, BATCH_SIZE, num_tokens)
        logits, cache = trial.feed(trial.tokens[np.arange(BATCH_SIZE)[:, None], columns], starts, cache)
        trial.compare(promise, logits, starts)


def _check_end_of_cache(trial: _Trial) -> None:
    promise = _Promise(
        "what a call would write past the end of the cache must be dropped, and what it writes before must stay",
        "Write with .at[row, slot].set(..., mode='drop'): dynamic_update_slice moves the whole call back onto slots "
        "of committed tokens, and a table of positions may have no row for what lies past its end",
    )
    start = NUM_TOKENS - CHUNK // 2
    cache = trial.run(promise, [(0, CHUNK), (CHUNK, CHUNK), (start - CHUNK, CHUNK)], trial.new_cache())
    past = np.concatenate([trial.tokens[:, start:], trial.others[:, : CHUNK // 2]], axis=1)
    logits, cache = trial.feed(past, start, cache)
    trial.compare(promise, logits, start)
    trial.run(promise, [(NUM_TOKENS - 1, 1)], cache)


def _check_tree(trial: _Trial) -> None:
    """Feed a tree, if the model reads the mask: two children of the last token, one with a child and a grandchild."""
    promise = _Promise(
        "a token of a tree must see the slots before the call and, inside it, those of its mask",
        "Take slots from positions[:, :1] + arange(T), for siblings share a position and never a slot, and rotations "
        "or embeddings from inputs.positions; or do not read inputs.mask, for chains need none",
    )
    mask = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    positions = CHUNK + np.broadcast_to(np.array([0, 0, 1, 2], np.int32), (BATCH_SIZE, 4))
    tokens = np.stack([trial.tokens[:, 4], trial.others[:, 4], trial.tokens[:, 5], trial.tokens[:, 6]], axis=1)
    _, cache = trial.feed(trial.tokens[:, :CHUNK], 0, trial.new_cache())
    try:
        logits, _ = _feed(trial.model, tokens, positions, cache, np.broadcast_to(mask, (BATCH_SIZE, 4, 4)))
    except (NotImplementedError, ValueError):
        return  # the model refuses trees
    chain, _ = _feed(trial.model, tokens, positions, cache)
    if np.array_equal(logits, chain):
        return
    trial.compare(promise, logits[:, [0, 2, 3]], CHUNK)
    sibling, _ = trial.feed(trial.others[:, CHUNK : CHUNK + 1], CHUNK, cache)
    alone = trial._replace(expected=np.repeat(sibling, NUM_TOKENS, axis=1))
    alone.compare(promise, logits[:, 1:2], CHUNK)


def _check_pages(trial: _Trial) -> None:
    """Feed tokens through tables in mixed order, in which some pages are missing, to a pool with NaN elsewhere."""
    promise = _Promise(
        "with inputs.pages, slot s of row b must be leaf[pages[b, s // page_size], s % page_size] in every leaf",
        "Write with specjax.pages.write_slots(leaf, slots, values, inputs.pages) and read with read_slots(leaf, "
        "inputs.pages), which gives the slots of each row in order; or set takes_pages to False",
    )
    order = np.random.default_rng(1).permutation(NUM_PAGES).astype(np.int32)
    pages = order[: BATCH_SIZE * NUM_TOKENS // PAGE_SIZE].reshape(BATCH_SIZE, -1)
    without = pages.copy()
    without[0], without[2] = NUM_PAGES, -1
    past = NUM_TOKENS - CHUNK // 2
    for table, rows in ((pages, np.arange(BATCH_SIZE)), (without, np.array([1]))):
        paged = trial._replace(pages=table)
        is_own = np.isin(np.arange(NUM_PAGES), table[rows])
        before = _poisoned(paged.new_cache(), ~is_own)
        cache = before
        for start, num_tokens in ((0, 1), (1, CHUNK), (CHUNK - 1, CHUNK), (2 * CHUNK - 1, CHUNK), (past, CHUNK)):
            columns = np.minimum(np.arange(start, start + num_tokens), NUM_TOKENS - 1)
            logits, cache = paged.feed(trial.tokens[:, columns], start, cache)
            paged.compare(promise, logits[rows], start, rows)
        for (path, leaf), old in zip(jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(before), strict=True):
            changed = [np.asarray(x)[~is_own] for x in (leaf, old)]
            if not np.array_equal(*changed, equal_nan=np.issubdtype(changed[0].dtype, np.inexact)):
                raise AssertionError(
                    f"{promise.text}: a call changes pages of cache{jax.tree_util.keystr(path)} that are in no row of "
                    "the table, in which the number of pages, larger numbers and negative ones stand for no page. "
                    f"{promise.remedy}."
                )


def _check_packed_calls(trial: _Trial) -> None:
    """Feed pieces of the rows side by side, to a pool with NaN elsewhere."""
    promise = _Promise(
        "with inputs.pieces, each token of a packed call sees its own sequence alone, the earlier tokens of its piece "
        "in this call included, and so does each token of the inputs.groups of a call",
        "Attend with models.cached_attention, which finds groups and the tiles of pieces, or set takes_groups to False",
    )
    pages = np.random.default_rng(2).permutation(NUM_PAGES).astype(np.int32)
    pages = pages[: BATCH_SIZE * NUM_TOKENS // PAGE_SIZE].reshape(BATCH_SIZE, -1)
    _check_calls(trial, promise, pages, logits_of_pieces)


def _check_ragged_calls(trial: _Trial) -> None:
    """Feed rows of other numbers of tokens without padding, to a pool with NaN elsewhere."""
    promise = _Promise(
        "with inputs.groups and fewer tokens than these have, each token sees its own row alone",
        "Attend with models.cached_attention, which finds the rows of a ragged call, or set takes_ragged to False",
    )
    pages = np.random.default_rng(3).permutation(NUM_PAGES).astype(np.int32)
    pages = pages[: BATCH_SIZE * NUM_TOKENS // PAGE_SIZE].reshape(BATCH_SIZE, -1)
    _check_calls(trial, promise, pages, logits_of_ragged_step)


def _check_calls(trial: _Trial, promise: _Promise, pages: np.ndarray, logits_of: Callable[..., Iterator]) -> None:
    paged = trial._replace(pages=pages)
    cache = _poisoned(paged.new_cache(), ~np.isin(np.arange(NUM_PAGES), pages))
    for row, first, logits in logits_of(trial.model, _call, trial.tokens, pages, cache):
        paged.compare(promise, logits, first, np.array([row]))


def _poisoned(cache: PyTree, pages: np.ndarray) -> PyTree:
    """Return the pool with NaN in the floats of some pages [num_pages] bool."""

    def poison(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(pages.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.nan, leaf)

    return jax.tree.map(poison, cache)


def _likely_cause(trial: _Trial) -> str | None:
    """Return the usual mistake that explains a broken promise, and the advice; None if it is none of these."""
    first, others = trial.tokens[:, :CHUNK], trial.others[:, :CHUNK]
    empty = trial.new_cache()
    if not jax.tree.leaves(empty):
        return "init_cache gives no arrays, so that a call cannot know what earlier calls were fed: give it a cache"
    if _has_nan(empty):
        return (
            "init_cache fills the cache with NaN, and 0 * NaN is NaN: attention weights of 0 do not hide an unseen "
            "slot. Fill it with zeros"
        )
    logits, cache = trial.feed(first, 0, empty)
    if _has_nan(cache):
        return "A call writes NaN to the cache, and 0 * NaN is NaN: attention weights of 0 do not hide an unseen slot"
    if _equal(cache, empty):
        return "apply returns the cache unchanged: return the cache that holds the tokens of the call"
    second = trial.tokens[:, CHUNK : 2 * CHUNK]
    after_first, after_others = (
        trial.feed(second, CHUNK, before)[0] for before in (cache, trial.feed(others, 0, empty)[1])
    )
    if _equal(after_first, after_others):
        return (
            "The logits of a call do not depend on the cache that it is given: read the slots before positions[:, 0], "
            "and return them with the new ones"
        )
    sizes = [[leaf.shape for _, leaf in _cache_leaves(trial.model, 1, size)] for size in (NUM_TOKENS, 2 * NUM_TOKENS)]
    if sizes[0] == sizes[1]:
        return (
            "No leaf of the cache grows with max_length: one state for the whole sequence cannot forget a rejected "
            f"draft or padding. If the model is recurrent, {SLOT_BY_SLOT}"
        )
    if _equal((logits, cache), trial.feed(first, 2, empty)):
        return (
            "apply does not read inputs.positions: take the slots of a call from positions[:, 0], not from how often "
            "it was called"
        )
    return None


def _has_nan(cache: PyTree) -> bool:
    return any(jnp.issubdtype(x.dtype, jnp.inexact) and bool(jnp.isnan(x).any()) for x in jax.tree.leaves(cache))


def _equal(first: PyTree, second: PyTree) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))


def _check_closure(model: Model) -> None:
    make = model.init_cache if model.init_rows is None else partial(model.init_memory, BATCH_SIZE)
    cache = jax.eval_shape(lambda: make(BATCH_SIZE, NUM_TOKENS))
    inputs = _inputs(BATCH_SIZE, min(CHUNK, model.max_step or CHUNK))
    program = jax.make_jaxpr(model.apply)(model.params, inputs, cache)
    closed_over, held = (
        sum(jnp.size(x) * jnp.result_type(x).itemsize for x in arrays)
        for arrays in (_constants(program), jax.tree.leaves(model.params))
    )
    if closed_over > held:
        raise AssertionError(
            f"apply must take its arrays from params: it closes over {closed_over} bytes of arrays, and params have "
            f"{held}. The logits are right, but every compiled program would hold a copy: put them into params"
        )


def _constants(program: Any) -> Iterator[Any]:
    """Yield the constant arrays of a jaxpr and of the jaxprs inside it."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        yield from (x.val for x in equation.invars if np.ndim(getattr(x, "val", 0)))
        for part in jax.tree.leaves(list(equation.params.values())):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from _constants(part)


def _check_identity(model: Model) -> None:
    for name in ("apply", "init_cache"):
        kind = _kind_by_identity(getattr(model, name))
        if kind is not None:
            raise AssertionError(
                f"{name} must compare by value, and it is {kind}, which compares by identity. The logits are right, "
                "but a model that is built again is traced and compiled again: use a module-level function, or a "
                "frozen dataclass with __call__ for what the function has to know"
            )


def _kind_by_identity(function: Any) -> str | None:
    """Return the kind of a function that compares by identity; None for a function that compares by value."""
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        return "a functools.partial"
    if inspect.ismethod(function):
        return None if inspect.isclass(function.__self__) else "a bound method"
    if inspect.isfunction(function):
        if function.__name__ == "<lambda>":
            return "a lambda"
        return f"a function that closes over {function.__code__.co_freevars[0]}" if function.__closure__ else None
    is_by_identity = type(function).__eq__ is object.__eq__ and not inspect.isclass(function)
    return f"an instance of {type(function).__name__}" if is_by_identity else None
