"""A small recurrent model that replays what was accepted, right or with one mistake, for tests of `assert_model`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.types import Memory, Model, ModelOutput

VOCAB, SIZE, MOST = 13, 4, 5
MISTAKES = (
    "the count of another row",
    "a window off by one",
    "a commit one call late",
    "padding that decays the state",
    "a state of the sequence before in the row",
    "a count of 0 taken as 1",
    "a prompt with one token more",
    "the first token of a step twice",
    "all drafts kept",
    "no commit of an empty draft",
    "a step that enters the state at once",
)


def advance(held, start, count, inputs, mistake):
    """The states after each of the inputs [B, T, D], and the rows after `count` [B] of them."""
    state, window = held["state"], held["window"]
    if mistake != MISTAKES[4]:
        state, window = (jnp.where((start == 0)[:, None] & (count > 0)[:, None], 0, x) for x in (state, window))
    line = jnp.concatenate([window[:, None], inputs], axis=1)

    def one(state, x):
        token, before, index = x
        new = 0.8 * state + token + 0.5 * before
        kept = jnp.where((index < count)[:, None], new, 0.8 * state if mistake == MISTAKES[3] else state)
        return kept, new

    index = jnp.arange(inputs.shape[1], dtype=jnp.int32)
    state, states = jax.lax.scan(one, state, (jnp.swapaxes(line[:, 1:], 0, 1), jnp.swapaxes(line[:, :-1], 0, 1), index))
    place = jnp.maximum(count - 1, 0) if mistake == MISTAKES[1] else count
    window = jnp.take_along_axis(line, place[:, None, None], axis=1)[:, 0]
    return jnp.swapaxes(states, 0, 1), {"state": state, "window": window}


@dataclass(frozen=True)
class Apply:
    mistake: str

    def __call__(self, params, inputs, cache):
        x, start, width = params["table"][inputs.tokens], inputs.positions[:, 0], inputs.tokens.shape[1]
        pending = cache["inputs"]
        if self.mistake == MISTAKES[7]:
            pending = jnp.concatenate([pending[:, :1], pending[:, :-1]], axis=1)
        _, checkpoint = advance(cache, cache["start"], cache["count"], pending, self.mistake)
        is_step = inputs.num_tokens is None
        count = jnp.full_like(start, width) if is_step else inputs.num_tokens
        if self.mistake == MISTAKES[6] and not is_step:
            count = jnp.where(count > 0, jnp.minimum(count + 1, width), 0)
        states, after = advance(checkpoint, start, count, x, self.mistake)
        if is_step and self.mistake != MISTAKES[10]:
            new = {"inputs": cache["inputs"].at[:, :width].set(x), "width": jnp.full_like(start, width), **checkpoint}
        else:
            new = {"inputs": cache["inputs"], "width": jnp.zeros_like(start), **after}
        return ModelOutput(states @ params["head"]), cache | new | {"count": jnp.zeros_like(start)}


@dataclass(frozen=True)
class Commit:
    mistake: str

    def __call__(self, memory, inputs, path, count):
        held, width = memory.rows, inputs.tokens.shape[1]
        if self.mistake == MISTAKES[0]:
            count = jnp.roll(count, 1)
        if self.mistake == MISTAKES[5]:
            count = jnp.maximum(count, 1)
        if self.mistake == MISTAKES[8]:
            count = jnp.where(count > 0, width, 0)
        if self.mistake == MISTAKES[9] and width == 1:
            count = jnp.zeros_like(count)
        if self.mistake == MISTAKES[10]:
            count = jnp.zeros_like(count)
        given = {"late": count, "count": held["late"] if self.mistake == MISTAKES[2] else count}
        return Memory(rows=held | given | {"start": inputs.positions[:, 0]})


def init(batch_size, max_length):
    numbers = {name: jnp.zeros(batch_size, jnp.int32) for name in ("count", "late", "start", "width")}
    vectors = {name: jnp.zeros((batch_size, SIZE)) for name in ("state", "window")}
    return numbers | vectors | {"inputs": jnp.zeros((batch_size, MOST, SIZE))}


def recurrent(mistake=""):
    table, head = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(VOCAB, SIZE), (SIZE, VOCAB)])
    )
    return Model({"table": table, "head": head}, Apply(mistake), init, VOCAB, commit=Commit(mistake))
