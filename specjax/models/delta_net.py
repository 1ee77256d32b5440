"""Gated delta nets, the recurrent layers of hybrids: a mixer of the one layer, and the rows of its memory.

A layer keeps one checkpoint of its state for each sequence, and beside it the inputs of the last step. `commit` says
how many of them the sequence keeps. The next call first applies these to the checkpoint, and then computes its own
tokens. So a rejected draft never enters a state, and a step writes one state, not one for each of its tokens.
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
MAX_STEP = 16  # tokens of a step whose inputs a row keeps: the pending token and 15 drafts
HEAD_AXES = {"state": 1, "window": 2, "inputs": 2, "rates": 3}  # of `DeltaNet.rows`, which devices may share
UNROLLED = 16  # up to so many rows, the substitution has no loop


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["held", "count", "from_nothing", "begins", "num_tokens"],
    meta_fields=["is_step"],
)
@dataclass(frozen=True)
class DeltaMemory:
    """The memory of one layer in a call of R rows; without `held` the rows are whole sequences, which are not kept."""

    held: Mapping[str, Array] | None  # of `DeltaNet.rows`, [R, ...]
    count: Array | None = None  # [R] int32, inputs of the last step that the sequence keeps
    from_nothing: Array | None = None  # [R] bool, whether these inputs begin the sequence: the checkpoint is older
    begins: Array | None = None  # [R] bool, whether the call begins the sequence
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
            "window": jnp.zeros((batch_size, self.conv_size - 1, self.channels), dtype),
            "inputs": jnp.zeros((batch_size, MAX_STEP, self.channels), dtype),
            "rates": jnp.zeros((batch_size, MAX_STEP, 2, heads), jnp.float32),
        }

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation, memory: DeltaMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        wide, gate, rates = self._project(config, params, call)
        num_rows, num_tokens = wide.shape[:2]
        inputs = wide[..., : self.channels]
        if memory.held is None:
            nothing = self.rows(num_rows, inputs.dtype)
            count = jnp.full(num_rows, num_tokens, jnp.int32)
            attended, _ = self._run(params["delta_conv"], (nothing["state"], nothing["window"]), inputs, rates, count)
            kept = None
        else:
            kept = dict(memory.held)
            if memory.is_step:
                attended, after = self.step(params, memory, wide, rates)
                kept["inputs"] = kept["inputs"].at[:, :num_tokens].set(inputs.astype(kept["inputs"].dtype))
                kept["rates"] = kept["rates"].at[:, :num_tokens].set(rates)
            else:
                before = _unless(memory.begins, self._replayed(params["delta_conv"], memory))
                attended, after = self._run(params["delta_conv"], before, inputs, rates, memory.num_tokens)
            kept["state"], kept["window"] = after
        normed = rms_norm(attended, (params["delta_scale"], config.norm_eps))
        gated = (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(call.residual.dtype)
        return join(config, params, "delta_out", gated.reshape(num_rows, num_tokens, -1), call), kept

    def _project(self, config: "DecoderConfig", params: Params, call: Sublayer) -> tuple[Array, Array, Array]:
        """Return the convolution's inputs, gates [R, T, heads, size], and beta and g [R, T, 2, heads].

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
            rates = rates.reshape(*shape, self.num_key_heads, 2, share).swapaxes(2, 3).reshape(*shape, 2, heads)
        else:
            inputs, gate = mixed, mixed[..., self.channels :]
            rates = rates.reshape(*shape, 2, heads)
        rates = rates.astype(jnp.float32)
        decay, bias = (params[name].astype(jnp.float32)[None, None] for name in ("delta_decay", "delta_decay_bias"))
        beta = jax.nn.sigmoid(rates[:, :, 0])
        g = -jnp.exp(decay) * jax.nn.softplus(rates[:, :, 1] + bias)
        return inputs, gate.reshape(*shape, heads, self.value_size), jnp.stack([beta, g], axis=2)

    @property
    def heads(self) -> kernels.Heads:
        """The sizes of the layer, as the kernels take them."""
        return kernels.Heads(self.num_key_heads, self.num_value_heads, self.key_size, self.value_size)

    def step(
        self, params: Params, memory: DeltaMemory, inputs: Array, rates: Array, *, implementation: str | None = None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Replay the kept inputs of the last step, and run the tokens of this one.

        Args:
            params: of the layer.
            memory: of the layer, with `held`.
            inputs: [R, T, C] or more numbers of a token, of which the convolution has the first C.
            rates: [R, T, 2, heads] float32: beta and g.
            implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the sizes.

        Returns:
            The outputs of the tokens [R, T, heads, size] float32, and the state and window after the kept inputs alone.

        Raises:
            NotImplementedError: if the named implementation does not support the sizes.
        """

        def by_xla(
            memory: DeltaMemory, inputs: Array, rates: Array, weight: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            checkpoint = self._replayed(weight, memory)
            before = _unless(memory.begins, checkpoint)
            return self._run(weight, before, inputs[..., : self.channels], rates, memory.num_tokens)[0], checkpoint

        def by_kernel(
            memory: DeltaMemory, inputs: Array, rates: Array, weight: Array, *, interpret: bool
        ) -> tuple[Array, tuple[Array, Array]]:
            held, count, from_nothing, begins = memory.held, memory.count, memory.from_nothing, memory.begins
            assert held is not None and count is not None and from_nothing is not None and begins is not None
            flags = {"from_nothing": from_nothing.astype(jnp.int32), "begins": begins.astype(jnp.int32)}
            replayed = kernels.Replayed(**held, count=count, **flags)
            output, state = kernels.step(replayed, inputs, rates, weight, self.heads, interpret=interpret)
            before = jnp.where(from_nothing[:, None, None], 0, held["window"])
            return output, (state, _window_after(before, held["inputs"], count))

        return dispatch(
            (memory, inputs, rates, params["delta_conv"]),
            xla=by_xla,
            pallas=by_kernel,
            reason=lambda *operands: kernels.unsupported(self.heads),
            implementation=implementation,
        )

    def _replayed(self, weight: Array, memory: DeltaMemory) -> tuple[Array, Array]:
        """Return the state and the window after the kept inputs of the last step."""
        held = memory.held
        assert held is not None, "only a call that keeps its rows replays"
        checkpoint = _unless(memory.from_nothing, (held["state"], held["window"]))
        return self._run(weight, checkpoint, held["inputs"], held["rates"], memory.count)[1]

    def _run(
        self, weight: Array, before: tuple[Array, Array], inputs: Array, rates: Array, count: Array | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Run tokens, of which `count` [R] stay; return outputs [R, T, heads, size], and the state and window after."""
        assert count is not None, "calls that keep rows have it"
        state, window = before
        num_rows, num_tokens = inputs.shape[:2]
        line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
        weight = weight[:, 0].astype(jnp.float32)
        taps = [line[:, i : i + num_tokens] * weight[None, None, :, i] for i in range(self.conv_size)]
        mixed = jax.nn.silu(sum(taps[1:], taps[0]))
        width = self.num_key_heads * self.key_size
        query, key, value = jnp.split(mixed, [width, 2 * width], axis=-1)
        query, key = (_unit(x.reshape(num_rows, num_tokens, -1, self.key_size)) for x in (query, key))
        value = value.reshape(num_rows, num_tokens, -1, self.value_size)
        stays = jnp.arange(num_tokens, dtype=jnp.int32)[None] < count[:, None]
        rates = jnp.where(stays[:, :, None, None], rates, 0)  # other tokens neither decay the state nor add to it
        # The kernels of chunks multiply in TF32, which has fewer digits than inputs of float32.
        implementation = "xla" if inputs.dtype == jnp.float32 else None
        query, beta, g = query * self.key_size**-0.5, rates[:, :, 0], rates[:, :, 1]
        output, state = delta_rule(state, query, key, value, beta, g, implementation=implementation)
        return output, (state, _window_after(window, inputs, count))


def _window_after(window: Array, inputs: Array, count: Array) -> Array:
    """Return the window [R, W - 1, C] after `count` [R] of the inputs [R, T, C] that follow a window."""
    line = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
    places = count[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(line, places[:, :, None], axis=1).astype(window.dtype)


def _unless(is_empty: Array | None, parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the state and the window, with zeros for the rows that `is_empty` [R]."""
    assert is_empty is not None, "calls that keep rows have it"
    state, window = (jnp.where(is_empty.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in parts)
    return state, window


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
        return kernels.chunks(state, kernels.Tokens(*tokens), heads, interpret=interpret)

    return dispatch(
        (state, query, key, value, beta, g),
        xla=_delta_rule,
        pallas=by_kernel,
        reason=lambda *operands: kernels.unsupported(heads),
        implementation=implementation,
    )


def _delta_rule(state: Array, query: Array, key: Array, value: Array, beta: Array, g: Array) -> tuple[Array, Array]:
    """Apply the rule by XLA."""
    share = value.shape[2] // key.shape[2]
    query, key = jnp.repeat(query, share, axis=2), jnp.repeat(key, share, axis=2)
    num_tokens = query.shape[1]
    size = min(CHUNK, num_tokens)
    padding = -num_tokens % size

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0)  # [chunks, R, H, size, ...]

    parts = tuple(map(chunked, (query, key, value, beta, g)))
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


def _chunk(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the state after a chunk and its outputs, from query, key, value [R, H, C, D], beta and g [R, H, C]."""
    query, key, value, beta, g = parts
    size = g.shape[-1]
    total = jnp.cumsum(g, axis=-1)
    is_before = jnp.tri(size, dtype=bool)[None, None]
    decay = jnp.exp(jnp.where(is_before, total[..., :, None] - total[..., None, :], -jnp.inf))
    scaled = key * beta[..., None]
    system = jnp.where(is_before & ~jnp.eye(size, dtype=bool)[None, None], scaled @ key.swapaxes(-1, -2) * decay, 0)
    grown = jnp.exp(total)[..., None]
    right = value * beta[..., None] - (scaled * grown) @ state
    new = _solved(system, right)
    output = (query * grown) @ state + (query @ key.swapaxes(-1, -2) * decay) @ new
    left = jnp.exp(total[..., -1:] - total)[..., None]
    state = state * jnp.exp(total[..., -1])[..., None, None] + (key * left).swapaxes(-1, -2) @ new
    return state, output


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
            "count": jnp.zeros(batch_size, jnp.int32),  # inputs of the last step that the sequence keeps
            "start": jnp.zeros(batch_size, jnp.int32),  # position of the first of them
            "layers": [mixer.rows(batch_size, self.dtype) for _, mixer in self.mixers],
        }


def commit(memory: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
    """Keep `count` [R] inputs of the last step, as `Model.commit` does; the next call applies them."""
    part = memory.take(inputs.rows)
    kept = part.rows | {
        "count": count.astype(jnp.int32),
        "start": jnp.where(count > 0, inputs.positions[:, 0], part.rows["start"]),
    }
    return memory.put(inputs.rows, Memory(memory.pools, kept))


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
    begins = (inputs.positions[:, 0] == 0) & (inputs.counts > 0)
    of_call = DeltaMemory(
        held=None,
        count=part["count"],
        from_nothing=(part["start"] == 0) & (part["count"] > 0),
        begins=begins,
        num_tokens=inputs.counts,
        is_step=is_step,
    )
    return {layer: replace(of_call, held=held) for layer, held in zip(layers, part["layers"], strict=True)}


def after_call(inputs: ModelInput, memory: Memory, pools: PyTree, layers: Sequence[Any]) -> Memory:
    """Return the memory after a call, given pools and rows of recurrent layers; nothing is pending until `commit`."""
    part = memory.take(inputs.rows).rows
    rows = part | {"count": jnp.zeros_like(part["count"]), "layers": list(layers)}
    return memory.put(inputs.rows, Memory(pools, rows))
