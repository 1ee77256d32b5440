"""Recurrent layers of hybrids: the rows of their memory, and the parts of a mixer that all kinds of them share.

A layer keeps one checkpoint of its state for each sequence, and beside it how each token of the last step changes the
state: a decay, a key, and the vector that is added along the key. `commit` says how many tokens of that step the
sequence keeps. The next call first applies their changes to the checkpoint, and then computes its own tokens. So a
rejected draft never enters a state, a step writes one state, not one for each of its tokens, and no token is computed
twice. A token has the slot of its position modulo the number of slots. The tokens of a call have other slots than those
that the call reads, so that a kernel writes and reads at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from specjax.parallel.loops import as_carry
from specjax.types import Array, Memory, ModelInput, PyTree

CHUNK = 64  # tokens that the chunk form takes at a time
MAX_STEP = 16  # tokens of a step whose changes a row keeps: the pending token and 15 drafts
NUM_SLOTS = 2 * MAX_STEP  # of changes: of a step that may be pending, and of the next one
HEAD_AXES = {"state": 1, "inputs": 2, "keys": 2, "changes": 2, "decays": 2}  # of `Recurrent.rows`, for devices to share


# The weights [C, 1, W] of a short causal convolution, and its bias [C], if it has one.
Convolution: TypeAlias = tuple[Array, Array | None]


@partial(
    jax.tree_util.register_dataclass, data_fields=["held", "start", "count", "num_tokens"], meta_fields=["is_step"]
)
@dataclass(frozen=True)
class RowMemory:
    """The memory of one layer in a call of R rows; without `held` the rows are whole sequences, which are not kept."""

    held: Mapping[str, Array] | None  # of `Recurrent.rows`, [R, ...]
    start: Array | None = None  # [R] int32, position of the first pending token; at 0 the sequence begins
    count: Array | None = None  # [R] int32, number of pending tokens, which the sequence keeps of the last step
    num_tokens: Array | None = None  # [R] int32, tokens of the call that stay; of a step, all its tokens
    is_step: bool = False  # whether `commit` will say which tokens stay

    @property
    def position(self) -> Array:
        """The position [R] of the first token of the call."""
        assert self.start is not None and self.count is not None, "calls that keep rows have both"
        return self.start + self.count


class RowMixer:
    """A mixer that keeps rows of sequences: inputs of a short convolution, and others where a subclass has any."""

    conv_size: int  # tokens that the convolution reads, the own one included
    window = None  # a mixer has the field; it sees all positions

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        raise NotImplementedError

    @property
    def num_input_slots(self) -> int:
        """Slots of inputs: of the convolution's window before a step, and of the step."""
        return self.conv_size - 1 + MAX_STEP

    def rows(self, batch_size: int, dtype: Any) -> dict[str, Array]:
        """Return the rows that the layer keeps of sequences that have not begun."""
        return {"inputs": jnp.zeros((batch_size, self.num_input_slots, self.channels), dtype)}

    def window_before(self, memory: RowMemory) -> Array:
        """Return the inputs before the tokens of a call that the convolution reads."""
        assert memory.held is not None, "only a call that keeps its rows has inputs before"
        size = self.conv_size - 1
        return _read(memory.held["inputs"], memory.position - size, size)

    def convolved(self, convolution: Convolution, window: Array, inputs: Array) -> Array:
        """Return the channels [R, T, C] float32 of inputs after a window."""
        num_tokens = inputs.shape[1]
        line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
        weight, bias = convolution
        weight = weight[:, 0].astype(jnp.float32)
        taps = [line[:, i : i + num_tokens] * weight[None, None, :, i] for i in range(self.conv_size)]
        mixed = sum(taps[1:], taps[0])
        if bias is not None:
            mixed += bias.astype(jnp.float32)[None, None]
        return mixed

    def inputs_after(self, memory: RowMemory, window: Array, inputs: Array) -> Array:
        """Return the slots of inputs after a call, given the inputs before it and its own."""
        assert memory.held is not None, "only a call that keeps its rows has slots"
        held = memory.held["inputs"]
        if memory.is_step:
            return _written(held, memory.position, inputs)
        assert memory.num_tokens is not None, "calls that keep rows have it"
        last = _window_after(window, inputs, memory.num_tokens)
        return _written(held, memory.position + memory.num_tokens - last.shape[1], last)


@dataclass(frozen=True)
class Recurrent(RowMixer):
    """A mixer whose value heads each keep a state; consecutive ones share a key head.

    Queries, keys and values are channels of a short convolution. A subclass says how they lie there (`heads_of`), and
    which vectors tokens add to the state along their keys (`output_and_changes`).
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int = 4

    decays_by_key: ClassVar[bool] = False  # whether each number of the keys has a decay; otherwise a head has one

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    def rows(self, batch_size: int, dtype: Any) -> dict[str, Array]:
        """Return the rows that the layer keeps of sequences that have not begun."""
        heads = self.num_value_heads
        return super().rows(batch_size, dtype) | {
            "state": jnp.zeros((batch_size, heads, self.key_size, self.value_size), jnp.float32),
            "keys": jnp.zeros((batch_size, NUM_SLOTS, self.num_key_heads, self.key_size), jnp.float32),
            "changes": jnp.zeros((batch_size, NUM_SLOTS, heads, self.value_size), jnp.float32),
            "decays": jnp.zeros((batch_size, NUM_SLOTS, heads, *[self.key_size] * self.decays_by_key), jnp.float32),
        }

    def heads_of(self, mixed: Array) -> tuple[Array, Array, Array]:
        """Return queries and keys [R, T, key heads, size], and values [R, T, heads, size], of channels [R, T, C]."""
        raise NotImplementedError

    def output_and_changes(self, state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the outputs of a chunk [R, H, C, D], and the vectors that are added to the state along its keys.

        Args:
            state: [R, H, key size, value size] float32, before the chunk.
            parts: query, key and value [R, H, C, size], and rates [R, H, C], of which g is the last, all float32. With
                `decays_by_key`, g is [R, H, C, key size].
        """
        raise NotImplementedError

    def run_chunks(self, state: Array, tokens: tuple[Array, ...], dtype: Any) -> tuple[Array, Array]:
        """Run tokens of prompts.

        Args:
            state: [R, H, key size, value size] float32.
            tokens: query, key, value and rates, as `by_chunks` takes them.
            dtype: of the inputs of the convolution.

        Returns:
            The outputs [R, T, H, value size] float32, and the state after the tokens.
        """
        return by_chunks(self.output_and_changes, state, *tokens)

    def step_by_xla(
        self, convolution: Convolution, memory: RowMemory, inputs: Array, rates: tuple[Array, ...]
    ) -> tuple[Array, dict[str, Array]]:
        """Apply the pending changes of the last step, and run the tokens of this one.

        Args:
            convolution: the parameters of the convolution.
            memory: of the layer, with `held`.
            inputs: [R, T, C] floats, of the convolution.
            rates: [R, T, heads] float32, of which the last is g, by whose exponential a token decays the state; with
                `decays_by_key` that is [R, T, heads, key size].

        Returns:
            The outputs of the tokens [R, T, heads, size] float32, and the layer's rows: the state after the pending
            changes alone, and the inputs and changes of the tokens in their slots.
        """
        held = memory.held
        assert held is not None, "a step keeps its rows"
        state = self._replayed(memory)
        window = self.window_before(memory)
        query, key, value = self.heads_of(jax.nn.silu(self.convolved(convolution, window, inputs)))
        parts = _by_heads(query, key, value, *rates)
        with jax.default_matmul_precision("highest"):
            output, changes = (x.swapaxes(1, 2) for x in self.output_and_changes(state, parts))
        entries = {"keys": key, "changes": changes, "decays": rates[-1]}
        kept = {name: _written(held[name], memory.position, each) for name, each in entries.items()}
        return output, {**kept, "state": state, "inputs": self.inputs_after(memory, window, inputs)}

    def prompt(
        self, convolution: Convolution, memory: RowMemory, inputs: Array, rates: tuple[Array, ...]
    ) -> tuple[Array, dict[str, Array] | None]:
        """Run tokens of prompts; return the outputs, and the layer's rows where they are kept, as `step_by_xla` does.

        Nothing is pending afterwards.
        """
        held, num_tokens = memory.held, memory.num_tokens
        if held is None:
            nothing, number = self.rows(len(inputs), inputs.dtype), jnp.full(len(inputs), inputs.shape[1], jnp.int32)
            before = nothing["state"], nothing["inputs"][:, : self.conv_size - 1]
            return self._run(convolution, before, inputs, rates, number)[0], None
        assert num_tokens is not None, "calls that keep rows have it"
        before = self._replayed(memory), self.window_before(memory)
        output, state = self._run(convolution, before, inputs, rates, num_tokens)
        return output, {**held, "state": state, "inputs": self.inputs_after(memory, before[1], inputs)}

    def _replayed(self, memory: RowMemory) -> Array:
        """Return the state after the pending changes of the last step."""
        held, start, count = memory.held, memory.start, memory.count
        assert held is not None and start is not None and count is not None, "only a call that keeps its rows replays"
        exists = jnp.arange(MAX_STEP, dtype=jnp.int32)[None] < count[:, None]

        def pending(name: str) -> Array:
            entries = _read(held[name], start, MAX_STEP)
            return jnp.where(exists.reshape(*exists.shape, *[1] * (entries.ndim - 2)), entries, 0)

        total = jnp.cumsum(pending("decays"), axis=1)
        total = total if self.decays_by_key else total[..., None]
        keys = jnp.repeat(pending("keys"), self.num_value_heads // self.num_key_heads, axis=2)
        left = keys * jnp.exp(total[:, -1:] - total)
        added = jnp.einsum("rthk,rthv->rhkv", left, pending("changes"), precision="highest")
        state = jnp.where((start == 0)[:, None, None, None], 0, held["state"])
        return state * jnp.exp(total[:, -1])[..., None] + added

    def _run(
        self,
        convolution: Convolution,
        before: tuple[Array, Array],
        inputs: Array,
        rates: tuple[Array, ...],
        count: Array,
    ) -> tuple[Array, Array]:
        """Run tokens, of which `count` [R] stay; return outputs [R, T, heads, size], and the state afterwards."""
        state, window = before
        heads = self.heads_of(jax.nn.silu(self.convolved(convolution, window, inputs)))
        stays = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < count[:, None]
        # Other tokens neither decay the state nor add to it.
        rates = tuple(jnp.where(jnp.expand_dims(stays, range(2, rate.ndim)), rate, 0) for rate in rates)
        return self.run_chunks(state, (*heads, *rates), inputs.dtype)


def _window_after(window: Array, inputs: Array, count: Array) -> Array:
    """Return the window [R, W - 1, C] after `count` [R] of the inputs [R, T, C] that follow a window."""
    line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
    places = count[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(line, places[:, :, None], axis=1).astype(window.dtype)


def _slots(first: Array, number: int, num_slots: int) -> Array:
    """Return the slots [R, number] of consecutive positions, given the first of each row."""
    return jnp.remainder(first[:, None] + jnp.arange(number, dtype=jnp.int32)[None], num_slots)


def _read(ring: Array, first: Array, number: int) -> Array:
    """Return the entries [R, number, ...] of consecutive positions from slots [R, S, ...]; 0 before position 0."""
    slots = _slots(first, number, ring.shape[1])
    exists = first[:, None] + jnp.arange(number, dtype=jnp.int32)[None] >= 0
    indices = (jnp.arange(ring.shape[0], dtype=jnp.int32)[:, None], slots)
    return jnp.where(exists.reshape(*exists.shape, *[1] * (ring.ndim - 2)), ring[indices], 0)


def _written(ring: Array, first: Array, entries: Array) -> Array:
    """Return the slots [R, S, ...] with the entries [R, T, ...] of consecutive positions."""
    slots = _slots(first, entries.shape[1], ring.shape[1])
    row = jnp.arange(ring.shape[0], dtype=jnp.int32)[:, None]
    return ring.at[row, slots].set(entries.astype(ring.dtype), unique_indices=True)


def by_chunks(
    output_and_changes: Callable[[Array, tuple[Array, ...]], tuple[Array, Array]],
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    *rates: Array,
    chunk_size: int = CHUNK,
) -> tuple[Array, Array]:
    """Run T tokens in chunks.

    Args:
        output_and_changes: as `Recurrent` has it; a token whose rates are 0 must leave the state as it is.
        state: [R, H, key size, value size] float32.
        query, key: [R, T, key heads, key size] float32; consecutive ones of the H heads share a key head.
        value: [R, T, H, value size] float32.
        rates: [R, T, H] float32, of which g is the last, and may have the key size after these axes.
        chunk_size: tokens of a chunk.

    Returns:
        The outputs [R, T, H, value size] float32, and the state after the tokens.
    """
    num_tokens = query.shape[1]
    size = min(chunk_size, num_tokens)
    padding = -num_tokens % size

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)  # [chunks, R, H, size, ...]

    def chunk(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        output, changes = output_and_changes(state, parts)
        _, key, *_, g = parts
        between, grown = decay_factors(g)
        left = between[:, :, -1]
        left = left if left.ndim == key.ndim else left[..., None]
        return state * grown[..., -1:, :].swapaxes(-1, -2) + (key * left).swapaxes(-1, -2) @ changes, output

    parts = tuple(map(chunked, _by_heads(query, key, value, *rates)))
    with jax.default_matmul_precision("highest"):
        if parts[0].shape[0] == 1:
            state, output = chunk(state, tuple(part[0] for part in parts))
            output = output[None]
        else:
            first = tuple(part[0] for part in parts)
            state = as_carry(lambda state: chunk(state, first)[0], state, parts)
            state, output = jax.lax.scan(chunk, state, parts)
    output = jnp.moveaxis(jnp.moveaxis(output, 0, 2), 1, 3)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :num_tokens], state


def _by_heads(query: Array, key: Array, *others: Array) -> tuple[Array, ...]:
    """Return arrays of heads and tokens [R, H, T, ...] of [R, T, H, ...]; consecutive heads share queries and keys."""
    share = others[0].shape[2] // key.shape[2]
    query, key = jnp.repeat(query, share, axis=2), jnp.repeat(key, share, axis=2)
    return tuple(x.swapaxes(1, 2) for x in (query, key, *others))


def decay_factors(g: Array) -> tuple[Array, Array]:
    """Return how a chunk's state decays from each token to later ones, else 0, and from its begin.

    Args:
        g: [R, H, C], or [R, H, C, key size] where each number of the keys has a decay.

    Returns:
        Factors [R, H, C, C], and [R, H, C, 1]; or [R, H, C, C, key size], and [R, H, C, key size].
    """
    total = jnp.cumsum(g, axis=2)
    is_before = jnp.expand_dims(jnp.tri(g.shape[2], dtype=bool), (0, 1, *range(4, g.ndim + 1)))
    between = jnp.exp(jnp.where(is_before, total[:, :, :, None] - total[:, :, None], -jnp.inf))
    return between, jnp.exp(total if g.ndim == 4 else total[..., None])


@dataclass(frozen=True)
class InitRows:
    """`Model.init_rows` of a decoder with recurrent layers."""

    mixers: tuple[tuple[int, RowMixer], ...]  # layers and their mixers
    dtype: str

    def __call__(self, batch_size: int) -> PyTree:
        return {
            "count": jnp.zeros(batch_size, jnp.int32),  # pending tokens, which the sequence keeps of the last step
            "start": jnp.zeros(batch_size, jnp.int32),  # position of the first of them, or of the next token
            "layers": [mixer.rows(batch_size, self.dtype) for _, mixer in self.mixers],
        }


def commit(memory: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
    """Keep `count` [R] tokens of the last step, as `Model.commit` does; the next call applies them."""
    part = memory.take(inputs.rows)
    kept = part.rows | {
        "count": count.astype(jnp.int32),
        "start": jnp.where(count > 0, inputs.positions[:, 0], part.rows["start"]),
    }
    return memory.put(inputs.rows, Memory(memory.pools, kept))


def _pending(inputs: ModelInput, rows: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return the position of the first pending token and their number [R] int32, both 0 where a call begins a row."""
    begins = (inputs.positions[:, 0] == 0) & (inputs.counts > 0)
    return jnp.where(begins, 0, rows["start"]), jnp.where(begins, 0, rows["count"])


def memories(inputs: ModelInput, memory: Memory | None, layers: Sequence[int]) -> dict[int, RowMemory]:
    """Return the memory of each of some layers in a call.

    Raises:
        ValueError: the call is a tree, or a step of more tokens than a row keeps.
    """
    if inputs.mask is not None:
        raise ValueError("inputs.mask must be None for a model with recurrent layers, which take chains, got a mask")
    if memory is None:
        return {layer: RowMemory(None) for layer in layers}
    is_step = inputs.num_tokens is None
    if is_step and inputs.tokens.shape[1] > MAX_STEP:
        raise ValueError(
            f"a step of a model with recurrent layers must have at most {MAX_STEP} tokens a row, so num_draft_tokens "
            f"at most {MAX_STEP - 1}, got {inputs.tokens.shape[1]}"
        )
    part = memory.take(inputs.rows).rows
    start, count = _pending(inputs, part)
    of_call = RowMemory(held=None, start=start, count=count, num_tokens=inputs.counts, is_step=is_step)
    return {layer: replace(of_call, held=held) for layer, held in zip(layers, part["layers"], strict=True)}


def after_call(inputs: ModelInput, memory: Memory, pools: PyTree, layers: Sequence[Any]) -> Memory:
    """Return the memory after a call, given pools and rows of recurrent layers; nothing is pending until `commit`."""
    part = memory.take(inputs.rows).rows
    first, count = _pending(inputs, part)
    start = first + count
    if inputs.num_tokens is not None:
        start += inputs.counts
    rows = {"start": start, "count": jnp.zeros_like(count), "layers": list(layers)}
    return memory.put(inputs.rows, Memory(pools, rows))
