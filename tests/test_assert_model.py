"""The verdict on models: right ones of every kind pass, and each wrong one is told its fault."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import write

from specjax import decode, proposers, sampling
from specjax.models import cached_attention, load
from specjax.models.vocabulary import resize_vocabulary
from specjax.pages import read_slots, write_slots
from specjax.sampling import SamplingParams
from specjax.testing import assert_model, bigram_model
from specjax.types import Model, ModelOutput

pytestmark = pytest.mark.slow  # the verdict on models; test_decoder.py has the library's own

VOCAB, SIZE = 17, 8


@dataclass(frozen=True)
class Attention:
    """`Model.apply` of one layer of attention over a cache; `wrong` names a mistake, and "" is right."""

    wrong: str = ""

    def __call__(self, params, inputs, cache):
        wrong, (batch_size, num_tokens) = self.wrong, inputs.tokens.shape
        row, index = jnp.arange(batch_size)[:, None], jnp.arange(num_tokens)[None]
        positions, start = inputs.positions, inputs.positions[:, :1]
        if wrong == "start of the first row":
            start = jnp.broadcast_to(start[:1], start.shape)
        if wrong == "counts calls":
            start = cache["count"][:, None]
            positions = start + index
        if wrong == "positions from 0":
            positions = jnp.broadcast_to(index, positions.shape)
        slots = positions if wrong == "siblings share a slot" else start + index
        x = params["embedding"][inputs.tokens] + jnp.sin(positions[..., None] * params["frequency"][None, None])
        if wrong == "mean over the batch":
            x = x - jnp.mean(x, axis=0, keepdims=True)
        if wrong == "counts rows":
            x = x * batch_size
        query, *new = jnp.split(x @ params["qkv"], 3, axis=-1)
        old = jax.tree.map(jnp.zeros_like, cache) if wrong == "fresh cache" else cache
        if wrong == "names rows":
            old = {name: leaf if name == "row" else leaf[cache["row"]] for name, leaf in cache.items()}

        def write(leaf, value):
            if wrong == "clamps":
                return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(leaf, value, start[:, 0])
            if wrong == "adds":
                return leaf.at[row, slots].add(value, mode="drop")
            return leaf.at[row, slots].set(value, mode="drop")

        key, value = write(old["key"], new[0]), write(old["value"], new[1])
        slot = jnp.arange(key.shape[1])[None, None]
        last = slots[:, -1:, None] if wrong == "sees its whole call" else slots[:, :, None]
        seen = slot <= last
        if wrong == "sees what is after":
            seen |= slot > slots[:, -1:, None]
        if inputs.mask is not None:
            inside = jnp.clip(slot - start[:, :, None], 0, num_tokens - 1)
            inside = jnp.take_along_axis(inputs.mask, jnp.broadcast_to(inside, (*slots.shape, slot.size)), axis=2)
            seen = (slot < start[:, :, None]) | ((slot < start[:, :, None] + num_tokens) & inside)
        scores = jnp.where(seen, jnp.einsum("btd,bsd->bts", query, key), -jnp.inf)
        logits = (x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), value)) @ params["head"]
        if wrong == "divides by 0":
            logits /= jnp.where(positions == 5, 0, 1)[..., None]
        returned = cache | {"key": key, "value": value}
        if "count" in cache:
            returned["count"] += num_tokens
        return ModelOutput(logits), cache if wrong == "returns the old cache" else returned


@dataclass(frozen=True)
class AttentionCache:
    """`Model.init_cache` of `Attention`."""

    wrong: str = ""

    def __call__(self, batch_size, max_length):
        num_slots = min(max_length, 64) if self.wrong == "ring buffer" else max_length
        fill = jnp.nan if self.wrong == "NaN in the cache" else 0.0
        cache = {name: jnp.full((batch_size, num_slots, SIZE), fill) for name in ("key", "value")}
        if self.wrong == "counts calls":
            cache["count"] = jnp.zeros(batch_size, jnp.int32)
        if self.wrong == "names rows":
            cache["row"] = jnp.arange(batch_size)
        return cache


def attention(wrong=""):
    shapes = {"embedding": (VOCAB, SIZE), "qkv": (SIZE, 3 * SIZE), "head": (SIZE, VOCAB), "frequency": (SIZE,)}
    params = {name: jax.random.normal(jax.random.key(i), shape) / 2 for i, (name, shape) in enumerate(shapes.items())}
    return Model(params, Attention(wrong), AttentionCache(wrong), VOCAB)


@dataclass(frozen=True)
class Recurrent:
    """`Model.apply` of a recurrent network whose slot s holds the state after token s; "" is right."""

    wrong: str = ""

    def __call__(self, params, inputs, cache):
        row, start = jnp.arange(len(inputs.tokens)), inputs.positions[:, 0]
        if self.wrong == "last state":
            state = cache
        elif self.wrong == "slot -1":
            state = cache[row, start - 1]
        else:
            previous = jnp.maximum(start - 1, 0)
            if self.wrong == "last four states":
                previous %= 4
            state = jnp.where(start[:, None] > 0, cache[row, previous], 0)

        def step(state, x):
            state = jnp.tanh(state @ params["state"] + x)
            return state, state

        last, states = jax.lax.scan(step, state, jnp.moveaxis(params["embedding"][inputs.tokens], 1, 0))
        states = jnp.moveaxis(states, 0, 1)
        logits = states @ params["embedding"].T
        slots = start[:, None] + jnp.arange(states.shape[1])[None]
        if self.wrong == "last four states":
            slots, states = slots[:, -4:] % 4, states[:, -4:]
        if self.wrong == "last state":
            cache = last
        elif self.wrong == "last state of a call":
            cache = cache.at[row, slots[:, -1]].set(last, mode="drop")
        else:
            cache = cache.at[row[:, None], slots].set(states, mode="drop")
        return ModelOutput(logits), cache


def states(batch_size, max_length):
    return jnp.zeros((batch_size, max_length, SIZE))


def last_state(batch_size, max_length):
    return jnp.zeros((batch_size, SIZE))


def four_states(batch_size, max_length):
    return jnp.zeros((batch_size, 4, SIZE))


def recurrent(wrong=""):
    params = {
        "embedding": jax.random.normal(jax.random.key(0), (VOCAB, SIZE)),
        "state": jax.random.normal(jax.random.key(1), (SIZE, SIZE)),
    }
    init_cache = {"last state": last_state, "last four states": four_states}.get(wrong, states)
    return Model(params, Recurrent(wrong), init_cache, VOCAB)


@pytest.mark.parametrize("make", [attention, recurrent])
def test_right_models(make):
    assert_model(make())


def test_models_without_a_cache():
    assert_model(bigram_model(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))))
    assert_model(bigram_model(jnp.zeros((2, 2))))


@pytest.mark.parametrize("case", ["gemma2", "opt_post_norm"])
def test_own_models(case, tmp_path):
    """One of each network; logits of more tokens than the model has are -inf."""
    assert_model(resize_vocabulary(load(write(tmp_path / case, case)), 70), tolerance=1e-5)


@pytest.mark.parametrize(
    ("make", "wrong", "promise", "advice"),
    [
        (attention, "sees its whole call", "not see those after it in its call: at row 0, position 0", "Attend to"),
        (attention, "mean over the batch", "must not depend on the other rows", "Compute nothing across the leading"),
        (
            attention,
            "counts rows",
            "nor on how many they are: at row 1, position 0",
            "Compute nothing across the leading",
        ),
        (attention, "names rows", "rows of the cache must be those of the batch", "nothing in a leaf that names a row"),
        (attention, "returns the old cache", "several calls must give", "apply returns the cache unchanged"),
        (attention, "fresh cache", "several calls must give", "do not depend on the cache that it is given"),
        (attention, "positions from 0", "several calls must give .* position 4", "by inputs.positions, not from 0"),
        (attention, "adds", "must overwrite the slots", r"Write with \.at\[row, slot\]\.set"),
        (attention, "sees what is after", "must not see later ones", "no token see a slot after its own"),
        (attention, "counts calls", "must overwrite the slots", "apply does not read inputs.positions"),
        (attention, "start of the first row", "padding after a prompt .* row 1", "neither that of the first row"),
        (attention, "clamps", "past the end of the cache must be dropped, .* position 10", "moves the whole"),
        (attention, "NaN in the cache", "several calls .* a logit is NaN", "init_cache fills the cache with NaN"),
        (attention, "divides by 0", "logits must be finite or -inf: .* position 5", "division by 0"),
        (attention, "siblings share a slot", "a token of a tree must see", "siblings share a position and never a"),
        (recurrent, "last state", "must overwrite the slots", "No leaf .* grows with max_length: one state for the"),
        (recurrent, "slot -1", "must overwrite the slots .* position 0", "no token see a slot after its own"),
        (recurrent, "last four states", "what rejected drafts left .* position 4", "No leaf .* grows with max_length"),
        (recurrent, "last state of a call", "tokens that are fed again", "keep one state a slot, as docs/own-models"),
        (attention, "ring buffer", "every token must have a slot of its own: .*'key'.* of shape", "outside the window"),
    ],
)
def test_wrong_models(make, wrong, promise, advice):
    with pytest.raises(AssertionError, match=f"{promise}.*{advice}"):
        assert_model(make(wrong))


@dataclass(frozen=True)
class Paged:
    """`Model.apply` of a mean over the slots of a pool; `wrong` names a mistake, and "" is right."""

    wrong: str = ""

    def __call__(self, params, inputs, cache):
        table, num_pages = inputs.pages, len(cache)
        slots = inputs.positions[:, :1] + jnp.arange(inputs.tokens.shape[1])[None]
        x = params["embedding"][inputs.tokens]
        if self.wrong == "wraps" and table is not None:
            page = jnp.take_along_axis(table, slots // cache.shape[1], axis=1, mode="fill", fill_value=len(cache))
            cache = cache.at[page, slots % cache.shape[1]].set(x, mode="drop")
        elif self.wrong == "clips":
            cache = write_slots(cache, slots, x, None if table is None else jnp.clip(table, 0, num_pages - 1))
        else:
            cache = write_slots(cache, slots, x, None if self.wrong == "ignores pages" else table)
        held = cache[: len(slots)] if self.wrong == "ignores pages" else read_slots(cache, table)
        if self.wrong == "sorts pages" and table is not None:
            held = read_slots(cache, jnp.sort(table, axis=1))
        seen = jnp.arange(held.shape[1])[None, None] <= slots[..., None]
        if self.wrong == "reads everything" and table is not None:
            x = x + 0 * jnp.sum(cache)
        mean = jnp.sum(jnp.where(seen[..., None], held[:, None], 0), axis=2) / (slots + 1)[..., None]
        return ModelOutput((x + mean) @ params["head"]), cache


def paged_cache(num_pages, page_size):
    return jnp.zeros((num_pages, page_size, SIZE))


def heads_before_slots(num_pages, page_size):
    return jnp.zeros((num_pages, 2, page_size, SIZE))


def paged(wrong=""):
    shapes = {"embedding": (VOCAB, SIZE), "head": (SIZE, VOCAB)}
    params = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    return Model(params, Paged(wrong), paged_cache, VOCAB, takes_pages=True)


class TestPages:
    def test_right_ones_pass(self):
        assert_model(paged())
        assert_model(bigram_model(jnp.zeros((VOCAB, VOCAB))))

    @pytest.mark.parametrize(
        "wrong, message",
        [
            ("ignores pages", "a logit is off by"),
            ("sorts pages", "a logit is"),
            ("reads everything", "a logit is NaN"),
            ("wraps", "a call changes pages of cache"),
            ("clips", "a call changes pages of cache"),
        ],
    )
    def test_wrong_ones(self, wrong, message):
        with pytest.raises(
            AssertionError, match=rf"slot s of row b must be leaf\[.*{message}.*specjax.pages.write_slots"
        ):
            assert_model(paged(wrong))

    def test_the_layout(self):
        wrong = Model(jnp.zeros((VOCAB, VOCAB)), right, heads_before_slots, VOCAB, takes_pages=True)
        with pytest.raises(AssertionError, match=r"must be \[num_pages, page_size, ...\]: init_cache\(2, 12\) gives"):
            assert_model(wrong)


def attends_to_pieces(params, inputs, cache):
    heads = params["embedding"][inputs.tokens][:, :, None]
    attended, cache = cached_attention(heads, heads, heads, cache, inputs)
    return ModelOutput((heads + attended)[:, :, 0] @ params["head"]), cache


def takes_the_first_piece_for_all(params, inputs, cache):
    if inputs.pieces is not None:
        inputs = inputs._replace(pieces=None, pages=inputs.pages[:1])
    return attends_to_pieces(params, inputs, cache)


def takes_groups_for_a_sequence(params, inputs, cache):
    if inputs.groups is not None:
        inputs = inputs._replace(groups=None, pages=inputs.groups[0].pages)
    return attends_to_pieces(params, inputs, cache)


def takes_ragged_rows_for_whole_ones(params, inputs, cache):
    if inputs.groups is not None and inputs.groups[0].num_tokens is not None:
        first = inputs.groups[0]
        positions = first.positions.reshape(1, -1)[:, : inputs.tokens.shape[1]]
        inputs = inputs._replace(groups=(first._replace(num_tokens=None),), positions=positions)
    return attends_to_pieces(params, inputs, cache)


def keys_and_values(num_pages, page_size):
    return dict.fromkeys(("key", "value"), jnp.zeros((num_pages, page_size, 1, SIZE)))


@pytest.mark.slow
def test_packed_calls():
    model = replace(paged(), apply=attends_to_pieces, init_cache=keys_and_values, takes_groups=True)
    assert_model(model)
    with pytest.raises(AssertionError, match=r"with inputs.pieces, each token .* set takes_groups to False"):
        assert_model(replace(model, apply=takes_the_first_piece_for_all))
    with pytest.raises(AssertionError, match=r"of the inputs.groups of a call"):
        assert_model(replace(model, apply=takes_groups_for_a_sequence))
    model = replace(model, takes_ragged=True)
    assert_model(model)
    with pytest.raises(AssertionError, match=r"fewer tokens than these have, each .* set takes_ragged to False"):
        assert_model(replace(model, apply=takes_ragged_rows_for_whole_ones))


def bare_array(table, inputs, cache):
    return table[inputs.tokens]


def bare_pair(table, inputs, cache):
    return table[inputs.tokens], cache


def rounds(table, inputs, cache):
    return ModelOutput(table[inputs.tokens] * (1 + 0.001 * inputs.tokens.shape[1])), cache


def last_token(table, inputs, cache):
    return ModelOutput(table[inputs.tokens[:, -1]]), cache


def integers(table, inputs, cache):
    return ModelOutput(table[inputs.tokens].astype(jnp.int32)), cache


def narrower(table, inputs, cache):
    return ModelOutput(table[inputs.tokens][..., :-1]), cache


def wider(table, inputs, cache):
    return ModelOutput(jnp.pad(table, ((0, 0), (0, 3)))[inputs.tokens]), cache


def wraps_the_cache(table, inputs, cache):
    return ModelOutput(table[inputs.tokens]), [cache]


def rounds_the_cache(table, inputs, cache):
    return ModelOutput(table[inputs.tokens]), cache.astype(jnp.bfloat16)


def grows_the_cache(table, inputs, cache):
    return ModelOutput(table[inputs.tokens]), jnp.concatenate([cache, cache[:, : inputs.tokens.shape[1]]], axis=1)


def looks_at_values(table, inputs, cache):
    return ModelOutput(table[inputs.tokens]), cache if inputs.positions[0, 0] > 0 else 0 * cache


def right(table, inputs, cache):
    return ModelOutput(table[inputs.tokens]), cache


def layers_first(batch_size, max_length):
    return {"key": jnp.zeros((2, 4, batch_size, max_length))}


def batch_and_slots_as_one(batch_size, max_length):
    return jnp.zeros((batch_size * max_length, SIZE))


def table_model(apply, init_cache=states):
    return Model(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)), apply, init_cache, VOCAB)


FORMS = [
    (bare_array, r"apply must return \(ModelOutput, cache\), got .*: wrap the logits"),
    (bare_pair, r"apply must return \(ModelOutput, cache\), got \(\w+, \w+\): wrap the logits"),
    (last_token, r"the logits that apply returns must have shape \[B, T, V\] = \(3, 4, 17\), got \(3, 17\)"),
    (integers, "the logits that apply returns must be of one of the dtypes float32, .*, float64, got int32"),
    (narrower, r"must have shape \[B, T, V\] = \(3, 4, 17\), got \(3, 4, 16\)"),
    (wider, r"must have shape \[B, T, V\] = \(3, 4, 17\), got \(3, 4, 20\)"),
    (wraps_the_cache, r"apply must return a cache of the structure that it was given, PyTreeDef\(\*\), got .*\[\*\]"),
    (rounds_the_cache, r"return cache with the dtype and shape that it was given, float32 \(3, 12, 8\), got bfloat16"),
    (grows_the_cache, r"return cache with the dtype and shape that it was given, float32 \(3, .*\(3, 16, 8\)"),
]


@pytest.mark.parametrize(("apply", "verdict"), FORMS)
def test_wrong_forms(apply, verdict):
    with pytest.raises(AssertionError, match=verdict):
        assert_model(table_model(apply))


@pytest.mark.parametrize(("apply", "verdict"), FORMS)
def test_decoding_refuses_wrong_forms(apply, verdict):
    """Where the model is called: at the first call of the target, and at the first call of a draft model."""
    prompts, lengths = jnp.ones((3, 4), jnp.int32), jnp.full(3, 4)
    batch = sampling.batch([SamplingParams(max_tokens=4)] * 3)
    start = partial(decode.prefill, prompts=prompts, lengths=lengths, sampling=batch, keys=jax.random.key(0))
    wrong = table_model(apply)
    with pytest.raises(ValueError, match=verdict):
        start(wrong, None, max_length=12)
    with pytest.raises(ValueError, match=verdict):
        start(table_model(right), proposers.draft_model(wrong, 2), max_length=12)
    state = start(table_model(right), None, max_length=12)
    with pytest.raises(ValueError, match=verdict.replace("3, 4, ", "3, 1, ").replace("16, 8", "13, 8")):
        decode.step(wrong, None, state)


def test_tolerance():
    """A difference of 0.8 % is rounding where something has 16 bits, or where the caller says so."""
    model = table_model(rounds)
    assert_model(replace(model, params=model.params.astype(jnp.bfloat16)))
    assert_model(model, tolerance=0.02)
    with pytest.raises(AssertionError, match=r"off by 0.00\d* of the largest logit, where rounding may be 0.0001"):
        assert_model(model)


def test_values_of_traced_arrays():
    with pytest.raises(AssertionError, match="apply must be a pure function of traced arrays, and it asks"):
        assert_model(table_model(looks_at_values))


@pytest.mark.parametrize(
    ("init_cache", "shape"),
    [(layers_first, r"\['key'\] of shape \(2, 4, 3, 12\)"), (batch_and_slots_as_one, r"\(24, 8\)")],
)
def test_cache_without_a_leading_batch(init_cache, shape):
    with pytest.raises(AssertionError, match=f"must have the batch as its leading axis: .*{shape}"):
        assert_model(table_model(right, init_cache))


class Bound:
    def __init__(self, table):
        self.table = table

    def apply(self, params, inputs, cache):
        return ModelOutput(params[inputs.tokens]), cache

    def __call__(self, params, inputs, cache):
        return ModelOutput(self.table[inputs.tokens]), cache

    @staticmethod
    def init_cache(batch_size, max_length):
        return ()


def scaled(factor, table, inputs, cache):
    return ModelOutput(factor * table[inputs.tokens]), cache


def make_scaled(factor):
    def apply(table, inputs, cache):
        return ModelOutput(factor * table[inputs.tokens]), cache

    return apply


TABLE = np.eye(VOCAB, dtype=np.float32)


@pytest.mark.parametrize(
    ("apply", "verdict"),
    [
        (partial(scaled, 2.0), "apply must compare by value, and it is a functools.partial, which"),
        (lambda table, inputs, cache: (ModelOutput(table[inputs.tokens]), cache), "it is a lambda, which"),
        (Bound(TABLE).apply, "it is a bound method, which"),
        (make_scaled(2.0), "it is a function that closes over factor, which"),
        (jax.jit(make_scaled(2.0)), "it is a function that closes over factor, which"),
        (jax.jit(right), None),
        (Bound.init_cache, None),
    ],
)
def test_functions_that_compare_by_identity(apply, verdict):
    model = table_model(right, apply) if apply is Bound.init_cache else table_model(apply, Bound.init_cache)
    if verdict is None:
        assert_model(model)
        return
    with pytest.raises(AssertionError, match=verdict):
        assert_model(model)


def closes_over(params, inputs, cache):
    return ModelOutput(jnp.asarray(TABLE)[inputs.tokens]), cache


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint])
def test_weights_outside_params(wrapped):
    size = TABLE.nbytes
    with pytest.raises(AssertionError, match=f"closes over {size} bytes of arrays, and params have 0"):
        assert_model(Model((), wrapped(closes_over), Bound.init_cache, VOCAB))


def test_what_cannot_be_checked():
    model = attention()
    with pytest.raises(ValueError, match="model must be a Model, got function"):
        assert_model(right)
    with pytest.raises(ValueError, match="max_length of the model must be None or at least 12, got 11"):
        assert_model(replace(model, max_length=11))
    with pytest.raises(AssertionError, match=r"vocab_size must be an integer >= 1, got 17\.0"):
        assert_model(replace(model, vocab_size=17.0))
    with pytest.raises(AssertionError, match=r"apply must be hashable, .* got \[\]"):
        assert_model(replace(model, apply=[]))
