"""Gated delta nets, the recurrent layers of the hybrids of Qwen and OLMo: a mixer of the one layer."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import delta_net as kernels
from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape
from specjax.models.linear import linear_of_two, rms_norm
from specjax.models.recurrent import Recurrent, RowMemory, by_chunks, decay_factors
from specjax.models.rope import Rotation
from specjax.operations.dispatch import dispatch
from specjax.parallel.loops import as_carry
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

UNROLLED = 16  # up to so many rows, the substitution has no loop


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    """A gated delta net of some value heads, of which consecutive ones share a key head, with a short convolution."""

    by_heads: bool = False  # whether the projections' outputs lie together for each key head, as Qwen3-Next has them
    beta_factor: float = 1.0  # on the sigmoid that beta is; up to 2, the state along a key then may change its sign
    norm_eps: float | None = None  # epsilon of the norm of heads; None is the config's

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

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation, memory: RowMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        wide, gate, rates = self._project(config, params, call)
        num_rows, num_tokens = wide.shape[:2]
        if memory.is_step:
            attended, kept = self.step(params, memory, wide, rates)
        else:
            rates = self._rates(rates, params["delta_decay"], params["delta_decay_bias"])
            attended, kept = self.prompt((params["delta_conv"], None), memory, wide[..., : self.channels], rates)
        normed = rms_norm(
            attended, (params["delta_scale"], config.norm_eps if self.norm_eps is None else self.norm_eps)
        )
        gated = (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(call.residual.dtype)
        return join(config, params, "delta_out", gated.reshape(num_rows, num_tokens, -1), call), kept

    def _project(self, config: "DecoderConfig", params: Params, call: Sublayer) -> tuple[Array, Array, Array]:
        """Return the convolution's inputs, gates [R, T, heads, size], and rates [R, T, 2, heads].

        The inputs are the first C numbers of each token in an array that may have more, which kernels read as it is.
        """
        shape, heads = call.x.shape[:2], self.num_value_heads
        matrices = params["delta_in"], params["delta_rates"]
        mixed, rates = linear_of_two(call.x, *matrices, transposed=config.transposed, norm=call.norm)
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
        sizes = self.num_key_heads, self.num_value_heads, self.key_size, self.value_size
        return kernels.Heads(*sizes, self.beta_factor)

    def step(
        self, params: Params, memory: RowMemory, inputs: Array, rates: Array, *, implementation: str | None = None
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

        def by_xla(memory: RowMemory, new: kernels.Tokens) -> tuple[Array, dict[str, Array]]:
            rates, inputs = self._rates(new.rates, new.decay, new.bias), new.inputs[..., : self.channels]
            return self.step_by_xla((new.weight, None), memory, inputs, rates)

        def by_kernel(memory: RowMemory, new: kernels.Tokens, *, interpret: bool) -> tuple[Array, dict[str, Array]]:
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

    def heads_of(self, mixed: Array) -> tuple[Array, Array, Array]:
        """Return queries and keys, scaled to unit length, and values."""
        num_rows, num_tokens, width = *mixed.shape[:2], self.num_key_heads * self.key_size
        query, key, value = jnp.split(mixed, [width, 2 * width], axis=-1)
        query, key = (_unit(x.reshape(num_rows, num_tokens, -1, self.key_size)) for x in (query, key))
        return query * self.key_size**-0.5, key, value.reshape(num_rows, num_tokens, -1, self.value_size)

    def output_and_changes(self, state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the outputs of a chunk, and beta (v - S^T k) of its tokens, where S is the state before each."""
        return _output_and_changes(state, parts)

    def run_chunks(self, state: Array, tokens: tuple[Array, ...], dtype: Any) -> tuple[Array, Array]:
        """Run tokens of prompts by `delta_rule`."""
        # The kernels of chunks multiply in TF32, which has fewer digits than inputs of float32.
        return delta_rule(state, *tokens, implementation="xla" if dtype == jnp.float32 else None)

    def _rates(self, rates: Array, decay: Array, bias: Array) -> tuple[Array, Array]:
        """Return beta and g [R, T, heads] float32."""
        first, second = (rates[:, :, i].astype(jnp.float32) for i in range(2))
        decay, bias = (x.astype(jnp.float32)[None, None] for x in (decay, bias))
        return kernels.rates_of(first, second, decay, bias, self.beta_factor)


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
        xla=partial(by_chunks, _output_and_changes),
        pallas=by_kernel,
        reason=lambda *operands: kernels.unsupported(heads),
        implementation=implementation,
    )


def _output_and_changes(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the outputs of a chunk and the vectors [R, H, C, D] that are added to the state along its keys."""
    query, key, value, beta, g = parts
    between, grown = decay_factors(g)
    scaled = key * beta[..., None]
    system = jnp.tril(_products(scaled, key, between), -1)
    changes = _solved(system, value * beta[..., None] - (scaled * grown) @ state)
    return (query * grown) @ state + _products(query, key, between) @ changes, changes


def _products(x: Array, key: Array, between: Array) -> Array:
    """Return the products [R, H, C, C] of tokens with the keys of tokens, with the decays between these."""
    if between.ndim == 4:
        return x @ key.swapaxes(-1, -2) * between
    return jnp.einsum("rhik,rhjk,rhijk->rhij", x, key, between)


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
