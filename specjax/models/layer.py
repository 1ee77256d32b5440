"""A decoder layer: one pure function of a dict of arrays, which every family, drafter and training loss calls.

A layer is a mixer of tokens and a feed-forward network (`ffn`). Each reads the residual stream after a norm, and adds
its output to the stream. Frozen dataclasses describe a layer. They hold no arrays, name the parameters of their part,
and compute it, so that a new kind of mixer or ffn is a dataclass with the methods of `Attention` or `GatedMLP`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from pallas_kernels.attention import Chunks, HeadNorms, Window
from specjax.models.attention import KeyValues
from specjax.models.linear import AnyNorm, CentredNorm, Norm, linear, outputs_from, rms_norm, without_centred
from specjax.models.rope import QueryScaling, Rope, Rotation, rotate
from specjax.parallel.links import sum_over
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.beside_mlp import BesideMLP
    from specjax.models.decoder import DecoderConfig
    from specjax.models.experts import Experts
    from specjax.models.layer_input import LayerInput

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
XIELU = "xielu"  # the activation of that name, for which each layer has two numbers
XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6
GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}
NO_KEYS: tuple[Any, Any] = None, None  # the keys and values that a layer with another one's memory gives it
Params = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sublayer:
    """The input of a mixer or an ffn, and how its output joins the residual stream."""

    x: Array  # [B, T, ...], which the sublayer reads
    norm: Norm | None  # of `x`, which comes first; None for none
    residual: Array  # [B, T, h], to which the output is added
    finish: Callable[[Array], Array] | None = None  # function of the output [B, T, h] before the sum; None for none
    query_factor: Array | None = None  # [B, T] float32, which multiplies the queries of a mixer; None for none


class Around(Protocol):
    """A change of the normed input and of the output of both sublayers, a frozen dataclass."""

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters."""
        ...

    def __call__(
        self, config: "DecoderConfig", params: Params, name: str, x: Array
    ) -> tuple[Array, Callable[[Array], Array]]:
        """Return the input [B, T, h] of the sublayer "attention" or "mlp", and the function of its output."""
        ...


@dataclass(frozen=True)
class OutputGate:
    """Factors on the output of attention: a function of a product with its input."""

    function: str  # "sigmoid" or "softplus"
    by_head: bool = False  # whether a head has one factor; otherwise each of its numbers has one

    def size(self, head_size: int) -> int:
        """Return the number of factors of a head."""
        return 1 if self.by_head else head_size

    def __call__(self, config: "DecoderConfig", params: Params, call: Sublayer, attended: Array) -> Array:
        """Return the output of the heads [B, T, H, D] times their factors."""
        logits = product(config, params, "attention_gate", call.x, norm=call.norm)
        factors = GATES[self.function](logits.astype(jnp.float32)).astype(attended.dtype)
        return attended * factors.reshape(*attended.shape[:3], -1)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions.

    The sizes and the rotation are the config's. Query, key and value projections are one matrix.
    """

    window: int | None = None  # number of positions that a token sees, its own included; None is all
    has_bias: bool = False  # whether the query, key and value projections have biases
    has_out_bias: bool = False  # whether the output projection has a bias
    has_head_norms: bool = False  # whether each query and key head passes through a norm
    has_unit_norms: bool = False  # whether each query and key head is scaled to unit root mean square
    has_wide_norms: bool = False  # whether all query heads together, and all key heads, pass through a norm
    scale: float | None = None  # factor on the scores; None is 1 / sqrt(head_size)
    softcap: float | None = None  # cap c that turns a score s into c tanh(s / c)
    has_sinks: bool = False  # whether each head has the score of one more place, whose value is 0
    has_gate: bool = False  # whether the output is multiplied by sigmoids, whose rows follow each query head's
    rope: Rope | None = None  # how queries and keys turn; None is as the config says
    head_size: int | None = None  # numbers of a head; None is the config's
    num_heads: int | None = None  # number of query heads; None is the config's
    num_kv_heads: int | None = None  # number of key heads; None is the config's
    has_values: bool = True  # whether values have a projection; otherwise they are keys before norm and rotation
    has_value_norm: bool = False  # whether each value head is scaled to unit root mean square
    keys_of: int | None = None  # index of the earlier layer whose keys and values it attends to; None: its own
    norms_turned: bool = False  # whether the norms of heads are of heads that have turned, as in Hunyuan
    output_gate: OutputGate | None = None  # factors on the output, by another matrix; None for none
    query_scaling: QueryScaling | None = None  # factor on queries by their position; None is as the config says
    chunk: int | None = None  # positions of the parts of a sequence that tokens do not see beyond; None: no parts
    norms_by_head: bool = False  # whether the norm of each head has another scale; otherwise one scale is for all heads
    norms_have_biases: bool = False  # whether the norms of heads add a bias, which all heads share
    bound: float | None = None  # largest size of the numbers of queries, keys and values; None for none
    by_groups: bool = False  # whether the projections of each key head lie together: its queries, its key, its value
    value_size: int | None = None  # numbers of a value, fewer than a head has; None is as many
    value_factor: float = 1.0  # factor on values

    @property
    def seen(self) -> Window:
        """The positions that a token sees."""
        return self.window if self.chunk is None else Chunks(self.chunk)

    @property
    def query_parts(self) -> int:
        """Number of heads that each query head's projection has: the query, and its gate."""
        return 2 if self.has_gate else 1

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name, for attention that reads `inputs` numbers of a token."""
        config = self.sized(config)
        size = config.head_size
        num_own = 0 if self.keys_of is not None else 1 + self.has_values
        value_size = self.value_size or size
        width = (self.query_parts * config.num_heads + num_own * config.num_kv_heads) * size
        width -= config.num_kv_heads * (size - value_size)
        shapes: Shapes = {
            "qkv": matrix_shape(config, inputs, width),
            "attention_out": matrix_shape(config, config.num_heads * value_size, config.hidden_size),
        }
        if self.has_bias:
            shapes["qkv_bias"] = (width,)
        if self.has_out_bias:
            shapes["attention_out_bias"] = (config.hidden_size,)
        if self.has_head_norms:
            queries, keys = ((config.num_heads,), (config.num_kv_heads,)) if self.norms_by_head else ((), ())
            own: Shapes = {} if self.keys_of is not None else {"key_norm": (*keys, size)}
            shapes |= {"query_norm": (*queries, size)} | own
        if self.norms_have_biases:
            shapes |= {"query_norm_bias": (size,), "key_norm_bias": (size,)}
        if self.has_wide_norms:
            shapes |= {"query_norm": (config.num_heads * size,), "key_norm": (config.num_kv_heads * size,)}
        if self.has_sinks:
            shapes["sinks"] = (config.num_heads,)
        if self.output_gate is not None:
            shapes["attention_gate"] = matrix_shape(config, inputs, config.num_heads * self.output_gate.size(size))
        return shapes

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation | None, memory: KeyValues
    ) -> tuple[Array, Any]:
        """Return the residual stream after the attention [B, T, h], and the layer's cache afterwards."""
        config = self.sized(config)
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = product(config, params, "qkv", call.x, norm=call.norm)
        qkv = qkv if self.bound is None else jnp.clip(qkv, -self.bound, self.bound)
        rows, first = call.x.shape[:2], self.query_parts * heads
        if self.by_groups:
            of_group = heads // kv_heads
            parts = jnp.split(qkv.reshape(*rows, kv_heads, -1, size), [of_group, of_group + 1], axis=3)
            query, *own = (part.reshape(*rows, -1, size) for part in parts)
        elif self.value_size is not None:
            query, *own = jnp.split(qkv, [first * size, (first + kv_heads) * size], axis=2)
            own = [one.reshape(*rows, kv_heads, -1) for one in own]
        else:  # kernels read all heads as they are here, without a copy
            qkv = qkv.reshape(*rows, -1, size)
            query, *own = jnp.split(qkv, tuple(range(first, qkv.shape[2], kv_heads)), axis=2)
        query, *gate = jnp.unstack(query.reshape(*rows, heads, self.query_parts, size), axis=3)
        norms = self._norms_of_memory(config, params, call)
        query = self._placed(config, params, "query", query, turns, norms)
        if call.query_factor is not None:
            query = times(query, call.query_factor[..., None, None])
        key, value = self._own(config, params, turns, norms, *own) if own else NO_KEYS
        turns = None if self.norms_turned else turns
        options = turns, self.scale, self.softcap, params.get("sinks")
        attended, kept = memory.attend(query, key, value, *options, norms=norms)
        attended = attended[..., : self.value_size]
        if gate:
            attended = attended * jax.nn.sigmoid(gate[0])
        if self.output_gate is not None:
            attended = self.output_gate(config, params, call, attended)
        return join(config, params, "attention_out", attended.reshape(*rows, -1), call), kept

    def _norms_of_memory(self, config: "DecoderConfig", params: Params, call: Sublayer) -> HeadNorms | None:
        """Return the norms of heads that the memory applies, whose kernels do that in the launch that attends.

        They are None where numbers change places, or are multiplied, between the norm and the memory, and where no
        kernel has the norm.
        """
        rope = config.rope if self.rope is None else self.rope
        is_without_kernel = config.norms_are_centred or self.norms_by_head
        if not self.has_head_norms or is_without_kernel or rope.is_interleaved or call.query_factor is not None:
            return None
        query, key = norm_of(params["query_norm"], config), params.get("key_norm")
        return HeadNorms(query.scale, key, query.epsilon, query.offset)

    def _own(
        self,
        config: "DecoderConfig",
        params: Params,
        turns: Rotation | None,
        norms: HeadNorms | None,
        key: Array,
        value: Array | None = None,
    ) -> tuple[Any, Any]:
        """Return the keys and values of the layer [B, T, kv heads, D], given the projections of its input."""
        value = key if value is None else value
        if self.has_value_norm:
            value = unit_norm(config, value)
        if self.value_factor != 1:
            value = times(value, self.value_factor)
        if self.value_size is not None:  # caches and kernels have values of the size of keys
            value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[3] - self.value_size)))
        return self._placed(config, params, "key", key, turns, norms), value

    def keys_values(self, config: "DecoderConfig", params: Params, x: Array, turns: Rotation) -> tuple[Array, Array]:
        """Return the rotated keys and the values [B, T, kv heads, head size] of tokens, without their queries."""
        first = self.query_parts * config.num_heads * config.head_size  # queries stand before keys and values
        weight, bias = params["qkv"], params.get("qkv_bias")
        weight = outputs_from(weight, first, transposed=config.transposed)
        bias = None if bias is None else bias[first:][None, None]
        both = linear(x, weight, transposed=config.transposed, residual=bias)
        key, value = jnp.split(both.reshape(*x.shape[:2], 2 * config.num_kv_heads, config.head_size), 2, axis=2)
        key = self._placed(config, params, "key", key, turns)
        return key if self.norms_turned else rotate(key, turns), value

    def sized(self, config: "DecoderConfig") -> "DecoderConfig":
        """Return the config with the sizes of this layer."""
        own = {"head_size": self.head_size, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        given = {name: size for name, size in own.items() if size is not None}
        return replace(config, **given) if given else config

    def _normed(self, config: "DecoderConfig", params: Params, name: str, heads: Array) -> Array:
        """Return queries or keys [B, T, H, D] after their norm, if they have one."""
        if self.has_wide_norms:
            flat = heads.reshape(*heads.shape[:2], -1)
            return rms_norm(flat, _norm(config, params, name), config.axis_name).reshape(heads.shape)
        if self.has_unit_norms:
            return unit_norm(config, heads)
        return rms_norm(heads, _norm(config, params, name)) if self.has_head_norms else heads

    def _placed(
        self,
        config: "DecoderConfig",
        params: Params,
        name: str,
        heads: Array,
        turns: Rotation | None,
        norms: HeadNorms | None = None,
    ) -> Array:
        """Return queries or keys [B, T, H, D] after their norm, in pairs; they turn before a norm of turned heads.

        Norms that the memory applies are left to it.
        """
        rope = config.rope if self.rope is None else self.rope
        normed = partial(self._normed, config, params, name) if norms is None else lambda heads: heads
        if self.norms_turned:
            return normed(rotate(in_pairs(rope, heads), turns))
        return in_pairs(rope, normed(heads))


@dataclass(frozen=True)
class GatedMLP:
    """The down projection of activation(gate projection) * (up projection). Gate and up projections are one matrix."""

    activation: str = "silu"  # of the gate, one of ACTIVATIONS
    has_bias: bool = False  # whether the three projections have biases
    size: int | None = None  # width; None is the config's
    gate_factor: float = 1.0  # factor on the gate before the activation

    def width(self, config: "DecoderConfig") -> int:
        """Return the number of outputs of the gate."""
        return config.mlp_size if self.size is None else self.size

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters by name."""
        hidden, size = config.hidden_size, self.width(config)
        shapes: Shapes = {
            "gate_up": matrix_shape(config, hidden, 2 * size),
            "mlp_out": matrix_shape(config, size, hidden),
        }
        return shapes | {"gate_up_bias": (2 * size,), "mlp_out_bias": (hidden,)} if self.has_bias else shapes

    def __call__(self, config: "DecoderConfig", params: Params, call: Sublayer) -> Array:
        """Return the residual stream after the MLP [B, T, h]."""
        activation = ACTIVATIONS[self.activation]
        if self.gate_factor != 1:
            activation = _Scaled(activation, self.gate_factor)
        gate_up = partial(product, config, params, "gate_up", call.x, norm=call.norm)
        # `linear` adds its residual after the activation, a bias comes before it. Its kernels have no error function.
        if self.has_bias or self.activation == "gelu":
            gate, up = jnp.split(gate_up(), 2, axis=-1)
            return join(config, params, "mlp_out", activation(gate) * up, call)
        return join(config, params, "mlp_out", gate_up(activation=activation), call)


@dataclass(frozen=True)
class _Scaled:
    """An activation of a multiple of its input; equal ones are one activation to `jax.jit`."""

    activation: Callable[[Array], Array]
    factor: float

    def __call__(self, x: Array) -> Array:
        return self.activation(times(x, self.factor))


@dataclass(frozen=True)
class MLP:
    """The down projection of activation(up projection), without a gate."""

    activation: str = "relu2"  # one of ACTIVATIONS, or XIELU
    has_bias: bool = False  # whether the two projections have biases

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters by name."""
        hidden, size = config.hidden_size, config.mlp_size
        shapes: Shapes = {"mlp_in": matrix_shape(config, hidden, size), "mlp_out": matrix_shape(config, size, hidden)}
        if self.has_bias:
            shapes |= {"mlp_in_bias": (size,), "mlp_out_bias": (hidden,)}
        return shapes | {"mlp_alphas": (2,)} if self.activation == XIELU else shapes

    def __call__(self, config: "DecoderConfig", params: Params, call: Sublayer) -> Array:
        """Return the residual stream after the MLP [B, T, h]."""
        up = product(config, params, "mlp_in", call.x, norm=call.norm)
        is_learned = self.activation == XIELU
        activated = xielu(up, params["mlp_alphas"]) if is_learned else ACTIVATIONS[self.activation](up)
        return join(config, params, "mlp_out", activated, call)


def xielu(x: Array, alphas: Array) -> Array:
    """Return xIELU of x, computed in float32: a square of positive numbers, and an exponential of others.

    Args:
        x: floats.
        alphas: [2], whose softplus is the factor on the square, and the factor on the exponential less XIELU_BETA.

    References:
        Huang and Schlag, "Deriving Activation Functions Using Integration", 2024 (https://arxiv.org/abs/2411.13010).
    """
    x32, (of_square, of_exponential) = x.astype(jnp.float32), jax.nn.softplus(alphas.astype(jnp.float32))
    square = of_square * x32 * x32
    exponential = (XIELU_BETA + of_exponential) * (jnp.expm1(jnp.minimum(x32, XIELU_EPSILON)) - x32)
    return (jnp.where(x32 > 0, square, exponential) + XIELU_BETA * x32).astype(x.dtype)


@dataclass(frozen=True)
class LayerConfig:
    """The kinds and options of one layer; its sizes stand in the `DecoderConfig`."""

    mixer: Any = Attention()  # or a mixer of another kind, as `delta_net.DeltaNet`; None for none
    ffn: "GatedMLP | MLP | Experts | BesideMLP | None" = GatedMLP()  # None for a layer without one
    has_norms: bool = True  # whether the inputs of mixer and ffn pass through a norm
    has_post_norms: bool = False  # whether the outputs of mixer and ffn pass through a norm
    mixer_factor: float = 1.0  # factor on the output of the mixer, after its norm
    ffn_factor: float = 1.0  # factor on the output of the ffn, after its norm
    has_scale: bool = False  # whether the residual stream after the layer is multiplied by a number
    around: Around | None = None  # changes the input and the output of both; None for no change
    input: "LayerInput | None" = None  # a third sublayer, of the numbers that tokens give to layers; None for none
    is_parallel: bool = False  # whether the ffn reads the input of the mixer
    shares_norm: bool = True  # whether the ffn of a parallel layer reads it after the norm of the mixer
    beside: Any = None  # a second mixer, which reads the input of the first after its norm; None for none
    beside_factor: float = 1.0  # factor on the output of that mixer, which has no norm

    @property
    def has_one_norm(self) -> bool:
        """Whether mixer and ffn read the output of one norm."""
        return self.is_parallel and self.shares_norm

    def shapes(self, config: "DecoderConfig", inputs: int | None = None) -> Shapes:
        """Return the shapes of the parameters by name.

        Args:
            config: the sizes.
            inputs: numbers of a token that the mixer reads as they are; None: it reads the residual stream normed.
        """
        hidden = config.hidden_size
        shapes, parts = {}, []
        if self.mixer is not None:
            shapes |= self.mixer.shapes(config, hidden if inputs is None else inputs)
            parts.append("attention")
        if self.beside is not None:
            shapes |= self.beside.shapes(config, hidden if inputs is None else inputs)
        if self.ffn is not None:
            shapes |= self.ffn.shapes(config)
            parts.append("mlp")
        is_normed = {"attention": inputs is None, "mlp": not self.has_one_norm}
        names = [f"{part}_norm" for part in parts if self.has_norms and is_normed[part]]
        if self.has_post_norms:
            names += [f"{part}_post_norm" for part in parts]
        if config.norms_have_biases:
            names += [f"{name}_bias" for name in names]
        if self.has_scale:
            shapes["layer_scale"] = (1,)
        if self.input is not None:
            shapes |= self.input.shapes(config)
        return shapes | dict.fromkeys(names, (hidden,)) | ({} if self.around is None else self.around.shapes(config))


@partial(jax.jit, static_argnames=("config", "layer"))  # under jit, layers that are equal are traced once
def run_layer(
    config: "DecoderConfig",
    layer: LayerConfig,
    params: Params,
    x: Array,
    turns: Rotation | None,
    memory: Any,
    residual: Array | None = None,
    query_factor: Array | None = None,
    given: Array | None = None,
    pick: Partial | None = None,
) -> tuple[Array, Any]:
    """Run a decoder layer.

    Args:
        config: the sizes.
        layer: the kinds and options of the layer.
        params: of the shapes of `LayerConfig.shapes`; without `attention_norm` the mixer reads `x` as it is.
        x: [B, T, ...], which the mixer reads.
        turns: the rotation of queries and keys; None for a layer that does not see positions.
        memory: the keys and values that the mixer attends to, or the rows that it keeps; with a mixer beside it, the
            memories of both.
        residual: [B, T, h], the residual stream; None: it is `x`.
        query_factor: [B, T] float32, which multiplies the queries; None for none.
        given: [B, T, size], the numbers of the tokens for this layer; None for a layer without `input`.
        pick: function of the residual stream after the mixer [B, T, h] that returns the part [B', T', h] for which the
            rest of the layer is run; None is all of it. The layer has no `input`. A parallel layer picks from `x`, too.

    Returns:
        The residual stream after the layer [B, T, h], or the part of it, and the layer's cache afterwards.
    """
    stream, kept, rows = x if residual is None else residual, {}, None
    if layer.beside is not None:
        memory, rows = memory
        call = _enter(config, layer, params, "beside", x, stream)
        stream, rows = layer.beside(config, params, call, turns, rows)
    if layer.mixer is not None:
        call = _enter(config, layer, params, "attention", x, stream)
        stream, kept = layer.mixer(config, params, replace(call, query_factor=query_factor), turns, memory)
    kept = kept if layer.beside is None else (kept, rows)
    stream = stream if pick is None else pick(stream)
    if layer.ffn is not None:
        read = stream
        if layer.is_parallel:
            read = x if pick is None else pick(x)
        stream = layer.ffn(config, params, _enter(config, layer, params, "mlp", read, stream))
    if layer.input is not None:
        assert given is not None, "the decoder gives each layer its numbers"
        stream = layer.input(config, params, stream, given)
    return stream * params["layer_scale"].astype(stream.dtype)[None, None] if layer.has_scale else stream, kept


def _enter(
    config: "DecoderConfig", layer: LayerConfig, params: Params, name: str, x: Array, residual: Array
) -> Sublayer:
    """Return the input of the sublayer "attention", "beside" or "mlp"."""
    of_norm = "mlp" if name == "mlp" and not layer.has_one_norm else "attention"
    norm = _norm(config, params, of_norm) if f"{of_norm}_norm" in params else None
    x, norm = without_centred(x, norm)
    if layer.around is not None:
        read, finish = layer.around(config, params, name, x if norm is None else rms_norm(x, norm))
        return Sublayer(read, None, residual, finish)
    return Sublayer(x, norm, residual, _finish(config, layer, params, name))


def _finish(config: "DecoderConfig", layer: LayerConfig, params: Params, name: str) -> Callable[[Array], Array] | None:
    """Return the function of a sublayer's output before the sum, named as `_enter` takes it; None for none."""
    post = _norm(config, params, f"{name}_post") if f"{name}_post_norm" in params else None
    factor = {"attention": layer.mixer_factor, "beside": layer.beside_factor, "mlp": layer.ffn_factor}[name]
    if factor == 1:
        return None if post is None else partial(rms_norm, norm=post)
    return lambda y: times(y if post is None else rms_norm(y, post), factor)


def times(x: Array, factor: Array | float) -> Array:
    """Return x times a factor, multiplied in float32."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def in_pairs(rope: Rope, heads: Array) -> Array:
    """Return queries or keys [B, T, H, D] with the numbers that turn together half of these apart.

    Queries and keys in another order have the same products.
    """
    if not rope.is_interleaved:
        return heads
    turned, kept = jnp.split(heads, [heads.shape[-1] if rope.size is None else rope.size], axis=-1)
    return jnp.concatenate([turned[..., 0::2], turned[..., 1::2], kept], axis=-1)


def join(config: "DecoderConfig", params: Params, name: str, y: Array, call: Sublayer) -> Array:
    """Return the residual stream plus the product of y with a matrix, of which each device has some rows."""
    weight, bias = params[name], params.get(f"{name}_bias")
    bias = None if bias is None else bias[None, None]
    if call.finish is not None:
        return call.residual + call.finish(_sum_of_parts(config, params, y, weight, bias))
    return _sum_of_parts(config, params, y, weight, call.residual if bias is None else call.residual + bias)


def _sum_of_parts(config: "DecoderConfig", params: Params, y: Array, weight: Array, residual: Array | None) -> Array:
    if config.axis_name is None:
        return linear(y, weight, transposed=config.transposed, residual=residual)
    own = linear(y, weight, transposed=config.transposed)
    return sum_over(own, config.axis_name, params.get("links"), residual)


def product(config: "DecoderConfig", params: Params, name: str, x: Array, **options: Any) -> Array:
    """Return the product of x with a matrix, plus its bias, if it has one."""
    bias = params.get(f"{name}_bias")
    if bias is not None:
        options["residual"] = bias[None, None]
    return linear(x, params[name], transposed=config.transposed, **options)


def matrix_shape(config: "DecoderConfig", inputs: int, outputs: int) -> tuple[int, int]:
    """Return the shape of a matrix, which is [outputs, inputs] where the config says that matrices are transposed."""
    return (outputs, inputs) if config.transposed else (inputs, outputs)


def norm_of(scale: Array, config: "DecoderConfig", bias: Array | None = None) -> AnyNorm:
    """Return the norm with this scale [D], and this bias [D] where norms subtract the mean, as `rms_norm` takes it."""
    if config.norms_are_centred:
        return CentredNorm(scale, config.norm_eps, config.norm_offset, bias)
    return Norm(scale, config.norm_eps, config.norm_offset)


def unit_norm(config: "DecoderConfig", x: Array) -> Array:
    """Scale x [B, T, ..., D] to unit root mean square over its last axis."""
    return rms_norm(x, (jnp.ones(x.shape[-1], jnp.float32), config.norm_eps))


def _norm(config: "DecoderConfig", params: Params, name: str) -> AnyNorm:
    return norm_of(params[f"{name}_norm"], config, params.get(f"{name}_norm_bias"))
