"""Gated delta nets, the recurrent layers of hybrids: a mixer of the one layer, and the rows of its memory.

A layer keeps one checkpoint of its state for each sequence, and beside it how each token of the last step changes the
state: a decay, a key, and the vector that is added along the key. `commit` says how many tokens of that step the
sequence keeps. The next call first applies their changes to the checkpoint, and then computes its own tokens. So a
rejected draft never enters a state, a step writes one state, not one for each of its tokens, and no token is computed
twice. A token has the slot of its position modulo the number of slots. The tokens of a call have other slots than those
that the call reads, so that a kernel writes and reads at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import delta_net as kernels
from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape, product
from specjax.models.linear import rms_norm
from specjax.models.rope import Rotation
from specjax.operations.dispatch import dispatch
from specjax.parallel.loops import as_carry
from specjax.types import Array, Memory, ModelInput, PyTree

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

CHUNK = 64  # tokens that the chunk form takes at a time
MAX_STEP = 16  # tokens of a step whose changes a row keeps: the pending token and 15 drafts
NUM_SLOTS = 2 * MAX_STEP  # of changes: of a step that may be pending, and of the next one
HEAD_AXES = {
    "state": 1,
    "inputs": 2,
    "keys": 2,
    "changes": 2,
    "decays": 2,
}  # of `DeltaNet.rows`, which devices may share
UNROLLED = 16  # up to so many rows, the substitution has no loop


@partial(
    jax.tree_util.register_dataclass, data_fields=["held", "start", "count", "num_tokens"], meta_fields=["is_step"]
)
@dataclass(frozen=True)
class DeltaMemory:
    """The memory of one layer in a call of R rows; without `held` the rows are whole sequences, which are not kept."""

    held: Mapping[str, Array] | None  # of `DeltaNet.rows`, [R, ...]
    start: Array | None = None  # [R] int32, position of the first pending token; at 0 the sequence begins
    count: Array | None = None  # [R] int32, number of pending tokens, which the sequence keeps of the last step
    num_tokens: Array | None = None  # [R] int32, tokens of the call that stay; of a step, all its tokens
    is_step: bool = False  # whether `commit` will say which tokens stay


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net of some value heads, of which consecutive ones share a key head, with a short convolution."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int = 4  # tokens that the convolution reads, the own one included
    by_heads: bool = False  # whether the projections' outputs lie together for each key head, as Qwen3-Next has them
    window = None  # a mixer has the field; it sees all positions

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def num_input_slots(self) -> int:
        """Slots of inputs: of the convolution's window before a step, and of the step."""
        return self.conv_size - 1 + MAX_STEP

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name."""
        heads, width = self.num_value_heads, self.num_value_heads * self.value_size
        return {
            "delta_in": matrix_shape(config, inputs, self.channels + width),
            "delta_rates": matrix_shape(config, inputs, 2 * heads),
            "delta_conv": (self.channels, 1, self.conv_size),
            "delta_decay": (heads,),
            "delta_decay_bias": (heads,),
            "delta_scale": (self.value_size,),
            "delta_out": matrix_shape(config, width, config.hidden_size),
        }

    def rows(self, batch_size: int, dtype: Any) -> dict[str, Array]:
        """Return the rows that the layer keeps of sequences that have not begun."""
        heads = self.num_value_heads
        return {
            "state": jnp.zeros((batch_size, heads, self.key_size, self.value_size), jnp.float32),
            "inputs": jnp.zeros((batch_size, self.num_input_slots, self.channels), dtype),
            "keys": jnp.zeros((batch_size, NUM_SLOTS, self.num_key_heads, self.key_size), jnp.float32),
            "changes": jnp.zeros((batch_size, NUM_SLOTS, heads, self.value_size), jnp.float32),
            "decays": jnp.zeros((batch_size, NUM_SLOTS, heads), jnp.float32),
        }

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation, memory: DeltaMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        wide, gate, rates = self._project(config, params, call)
        num_rows, num_tokens = wide.shape[:2]
        if memory.is_step:
            attended, kept = self.step(params, memory, wide, rates)
        else:
            rates = _rates(rates, params["delta_decay"], params["delta_decay_bias"])
            attended, kept = self._prompt(params["delta_conv"], memory, wide[..., : self.channels], rates)
        normed = rms_norm(attended, (params["delta_scale"], config.norm_eps))
        gated = (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(call.residual.dtype)
        return join(config, params, "delta_out", gated.reshape(num_rows, num_tokens, -1), call), kept

    def _project(self, config: "DecoderConfig", params: Params, call: Sublayer) -> tuple[Array, Array, Array]:
        """Return the convolution's inputs, gates [R, T, heads, size], and rates [R, T, 2, heads].

        The inputs are the first C numbers of each token in an array that may have more, which kernels read as it is.
        """
        shape, heads = call.x.shape[:2], self.num_value_heads
        mixed = product(config, params, "delta_in", call.x, norm=call.norm)
        rates = product(config, params, "delta_rates", call.x, norm=call.norm)
        if self.by_heads:
            share = heads // self.num_key_heads
            sizes = (self.key_size, self.key_size, share * self.value_size, share * self.value_size)
            ends = [sum(sizes[: i + 1]) for i in range(3)]
            parts = jnp.split(mixed.reshape(*shape, self.num_key_heads, -1), ends, axis=-1)
            *inputs, gate = [part.reshape(*shape, -1) for part in parts]
            inputs = jnp.concatenate(inputs, axis=-1)
            rates = rates.reshape(*shape, self.num_key_heads, 2, share).swapaxes(2, 3)
        else:
            inputs, gate = mixed, mixed[..., self.channels :]
        return inputs, gate.reshape(*shape, heads, self.value_size), rates.reshape(*shape, 2, heads)

    @property
    def heads(self) -> kernels.Heads:
        """The sizes of the layer, as the kernels take them."""
        return kernels.Heads(self.num_key_heads, self.num_value_heads, self.key_size, self.value_size)

    def step(
        self, params: Params, memory: DeltaMemory, inputs: Array, rates: Array, *, implementation: str | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Apply the pending changes of the last step, and run the tokens of this one.

        Args:
            params: of the layer.
            memory: of the layer, with `held`.
            inputs: [R, T, C] or more numbers of a token, of which the convolution has the first C.
            rates: [R, T, 2, heads] floats, from which beta and g are computed.
            implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the sizes.

        Returns:
            The outputs of the tokens [R, T, heads, size] float32, and the layer's rows: the state after the pending
            changes alone, and the inputs and changes of the tokens in their slots.

        Raises:
            NotImplementedError: if the named implementation does not support the sizes.
        """

        def by_xla(memory: DeltaMemory, new: kernels.Tokens) -> tuple[Array, dict[str, Array]]:
            held, position = memory.held, _position(memory)
            state, inputs = self._replayed(memory), new.inputs[..., : self.channels]
            query, key, value = self._convolved(new.weight, self._window(memory), inputs)
            rates = _rates(new.rates, new.decay, new.bias)
            parts = _by_heads(query, key, value, rates[:, :, 0], rates[:, :, 1])
            with jax.default_matmul_precision("highest"):
                output, changes = (x.swapaxes(1, 2) for x in _output_and_changes(state, parts))
            assert held is not None
            written = {"inputs": inputs, "keys": key, "changes": changes, "decays": rates[:, :, 1]}
            kept = {name: _written(held[name], position, entries) for name, entries in written.items()}
            return output, {**kept, "state": state}

        def by_kernel(memory: DeltaMemory, new: kernels.Tokens, *, interpret: bool) -> tuple[Array, dict[str, Array]]:
            assert memory.held is not None
            output, held = kernels.step(kernels.Held(**memory.held), new, self.heads, interpret=interpret)
            return output, held._asdict()

        vectors = params["delta_decay"], params["delta_decay_bias"]
        new = kernels.Tokens(inputs, rates, params["delta_conv"], *vectors, memory.start, memory.count)
        return dispatch(
            (memory, new),
            xla=by_xla,
            pallas=by_kernel,
            reason=lambda *operands: kernels.unsupported(self.heads),
            implementation=implementation,
        )

    def _prompt(
        self, weight: Array, memory: DeltaMemory, inputs: Array, rates: Array
    ) -> tuple[Array, dict[str, Array] | None]:
        """Run tokens of prompts; return the outputs [R, T, heads, size], and the layer's rows where they are kept."""
        held, num_tokens = memory.held, memory.num_tokens
        if held is None:
            nothing, number = self.rows(len(inputs), inputs.dtype), jnp.full(len(inputs), inputs.shape[1], jnp.int32)
            before = nothing["state"], nothing["inputs"][:, : self.conv_size - 1]
            return self._run(weight, before, inputs, rates, number)[0], None
        assert num_tokens is not None, "calls that keep rows have it"
        before = self._replayed(memory), self._window(memory)
        output, (state, window) = self._run(weight, before, inputs, rates, num_tokens)
        first = _position(memory) + num_tokens - window.shape[1]
        return output, {**held, "state": state, "inputs": _written(held["inputs"], first, window)}

    def _replayed(self, memory: DeltaMemory) -> Array:
        """Return the state after the pending changes of the last step."""
        held, start, count = memory.held, memory.start, memory.count
        assert held is not None and start is not None and count is not None, "only a call that keeps its rows replays"
        exists = jnp.arange(MAX_STEP, dtype=jnp.int32)[None] < count[:, None]
        keys, changes, decays = (
            jnp.where(
                exists.reshape(*exists.shape, *[1] * (held[name].ndim - 2)), _read(held[name], start, MAX_STEP), 0
            )
            for name in ("keys", "changes", "decays")
        )
        total = jnp.cumsum(decays, axis=1)
        left = jnp.exp(total[:, -1:] - total)[..., None]
        keys = jnp.repeat(keys, self.num_value_heads // self.num_key_heads, axis=2)
        added = jnp.einsum("rthk,rthv->rhkv", keys, changes * left, precision="highest")
        state = jnp.where((start == 0)[:, None, None, None], 0, held["state"])
        return state * jnp.exp(total[:, -1])[..., None, None] + added

    def _window(self, memory: DeltaMemory) -> Array:
        """Return the inputs before the tokens of a call that the convolution reads."""
        assert memory.held is not None, "only a call that keeps its rows has inputs before"
        size = self.conv_size - 1
        return _read(memory.held["inputs"], _position(memory) - size, size)

    def _run(
        self, weight: Array, before: tuple[Array, Array], inputs: Array, rates: Array, count: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Run tokens, of which `count` [R] stay; return outputs [R, T, heads, size], and the state and window after."""
        state, window = before
        query, key, value = self._convolved(weight, window, inputs)
        stays = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < count[:, None]
        rates = jnp.where(stays[:, :, None, None], rates, 0)  # other tokens neither decay the state nor add to it
        # The kernels of chunks multiply in TF32, which has fewer digits than inputs of float32.
        implementation = "xla" if inputs.dtype == jnp.float32 else None
        beta, g = rates[:, :, 0], rates[:, :, 1]
        output, state = delta_rule(state, query, key, value, beta, g, implementation=implementation)
        return output, (state, _window_after(window, inputs, count))

    def _convolved(self, weight: Array, window: Array, inputs: Array) -> tuple[Array, Array, Array]:
        """Return queries and keys [R, T, key heads, size] and values [R, T, heads, size] of inputs after a window."""
        num_rows, num_tokens = inputs.shape[:2]
        line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
        weight = weight[:, 0].astype(jnp.float32)
        taps = [line[:, i : i + num_tokens] * weight[None, None, :, i] for i in range(self.conv_size)]
        mixed = jax.nn.silu(sum(taps[1:], taps[0]))
        width = self.num_key_heads * self.key_size
        query, key, value = jnp.split(mixed, [width, 2 * width], axis=-1)
        query, key = (_unit(x.reshape(num_rows, num_tokens, -1, self.key_size)) for x in (query, key))
        return query * self.key_size**-0.5, key, value.reshape(num_rows, num_tokens, -1, self.value_size)


def _window_after(window: Array, inputs: Array, count: Array) -> Array:
    """Return the window [R, W - 1, C] after `count` [R] of the inputs [R, T, C] that follow a window."""
    line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
    places = count[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(line, places[:, :, None], axis=1).astype(window.dtype)


def _position(memory: DeltaMemory) -> Array:
    """Return the position [R] of the first token of a call."""
    assert memory.start is not None and memory.count is not None, "calls that keep rows have both"
    return memory.start + memory.count


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


def _rates(rates: Array, decay: Array, bias: Array) -> Array:
    """Return beta and g [R, T, 2, heads] float32."""
    first, second = (rates[:, :, i].astype(jnp.float32) for i in range(2))
    decay, bias = (x.astype(jnp.float32)[None, None] for x in (decay, bias))
    return jnp.stack(kernels.rates_of(first, second, decay, bias), axis=2)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta_rule(
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    g: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Apply the gated delta rule to T tokens in chunks of `CHUNK`.

    Token t decays the state S by exp(g), then S += k (beta (v - S^T k))^T, and its output is S^T q. In a chunk these
    T updates are products of matrices and the solution of one triangular system.

    Args:
        state: [R, H, key size, value size] float32.
        query, key: [R, T, key heads, key size] float32; consecutive ones of the H heads share a key head.
        value: [R, T, H, value size] float32.
        beta: [R, T, H] float32; with beta = 0 and g = 0 a token leaves the state as it is.
        g: [R, T, H] float32, at most 0.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the sizes.

    Returns:
        The outputs [R, T, H, value size] float32, and the state after the tokens.

    Raises:
        NotImplementedError: if the named implementation does not support the sizes.
    """
    heads = kernels.Heads(key.shape[2], value.shape[2], key.shape[3], value.shape[3])

    def by_kernel(state: Array, *tokens: Array, interpret: bool) -> tuple[Array, Array]:
        return kernels.chunks(state, kernels.Prompt(*tokens), heads, interpret=interpret)

    return dispatch(
        (state, query, key, value, beta, g),
        xla=_delta_rule,
        pallas=by_kernel,
        reason=lambda *operands: kernels.unsupported(heads),
        implementation=implementation,
    )


def _delta_rule(state: Array, query: Array, key: Array, value: Array, beta: Array, g: Array) -> tuple[Array, Array]:
    """Apply the rule by XLA."""
    num_tokens = query.shape[1]
    size = min(CHUNK, num_tokens)
    padding = -num_tokens % size

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)  # [chunks, R, H, size, ...]

    parts = tuple(map(chunked, _by_heads(query, key, value, beta, g)))
    with jax.default_matmul_precision("highest"):
        if parts[0].shape[0] == 1:
            state, output = _chunk(state, tuple(part[0] for part in parts))
            output = output[None]
        else:
            first = tuple(part[0] for part in parts)
            state = as_carry(lambda state: _chunk(state, first)[0], state, parts)
            state, output = jax.lax.scan(_chunk, state, parts)
    output = jnp.moveaxis(jnp.moveaxis(output, 0, 2), 1, 3)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :num_tokens], state


def _by_heads(query: Array, key: Array, *others: Array) -> tuple[Array, ...]:
    """Return arrays of heads and tokens [R, H, T, ...] of [R, T, H, ...]; consecutive heads share queries and keys."""
    share = others[0].shape[2] // key.shape[2]
    query, key = jnp.repeat(query, share, axis=2), jnp.repeat(key, share, axis=2)
    return tuple(x.swapaxes(1, 2) for x in (query, key, *others))


def _chunk(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the state after a chunk and its outputs, from query, key, value [R, H, C, D], beta and g [R, H, C]."""
    output, changes = _output_and_changes(state, parts)
    _, key, *_, g = parts
    total = jnp.cumsum(g, axis=-1)
    left = jnp.exp(total[..., -1:] - total)[..., None]
    return state * jnp.exp(total[..., -1])[..., None, None] + (key * left).swapaxes(-1, -2) @ changes, output


def _output_and_changes(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the outputs of a chunk and the vectors [R, H, C, D] that are added to the state along its keys."""
    query, key, value, beta, g = parts
    size = g.shape[-1]
    total = jnp.cumsum(g, axis=-1)
    is_before = jnp.tri(size, dtype=bool)[None, None]
    decay = jnp.exp(jnp.where(is_before, total[..., :, None] - total[..., None, :], -jnp.inf))
    scaled = key * beta[..., None]
    system = jnp.where(is_before & ~jnp.eye(size, dtype=bool)[None, None], scaled @ key.swapaxes(-1, -2) * decay, 0)
    grown = jnp.exp(total)[..., None]
    changes = _solved(system, value * beta[..., None] - (scaled * grown) @ state)
    return (query * grown) @ state + (query @ key.swapaxes(-1, -2) * decay) @ changes, changes


def _solved(system: Array, right: Array) -> Array:
    """Return x of (I + A) x = right [..., C, D], for strictly lower triangular A [..., C, C], a row after another."""
    size = system.shape[-1]

    def row(index: Array | int, x: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(system, index, 1, axis=-2) @ x
        return jax.lax.dynamic_update_slice_in_dim(
            x, jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2) - own, index, axis=-2
        )

    if size <= UNROLLED:
        for index in range(1, size):
            right = row(index, right)
        return right
    return jax.lax.fori_loop(1, size, row, as_carry(partial(row, 1), right, system))


@dataclass(frozen=True)
class InitRows:
    """`Model.init_rows` of a decoder with gated delta nets."""

    mixers: tuple[tuple[int, DeltaNet], ...]  # layers and their mixers
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


def memories(inputs: ModelInput, memory: Memory | None, layers: Sequence[int]) -> dict[int, DeltaMemory]:
    """Return the memory of each of some layers in a call.

    Raises:
        ValueError: the call is a tree, or a step of more tokens than a row keeps.
    """
    if inputs.mask is not None:
        raise ValueError("inputs.mask must be None for a model with gated delta nets, which take chains, got a mask")
    if memory is None:
        return {layer: DeltaMemory(None) for layer in layers}
    is_step = inputs.num_tokens is None
    if is_step and inputs.tokens.shape[1] > MAX_STEP:
        raise ValueError(
            f"a step of a model with gated delta nets must have at most {MAX_STEP} tokens a row, so num_draft_tokens "
            f"at most {MAX_STEP - 1}, got {inputs.tokens.shape[1]}"
        )
    part = memory.take(inputs.rows).rows
    start, count = _pending(inputs, part)
    of_call = DeltaMemory(held=None, start=start, count=count, num_tokens=inputs.counts, is_step=is_step)
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
