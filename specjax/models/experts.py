"""Mixtures of experts: an `ffn` of the one layer, whose router chooses some experts for each token.

A router is a frozen dataclass with the methods of `Router`. The matrices of experts are stacked, [experts, outputs,
inputs], as floats or as one `Quantized`, and stay stacked. Rows are sorted by expert and multiplied in tiles, each of
one expert, so that no product is over an expert that no token chose, and the output of a row does not depend on the
other rows of the call.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import choice, expert_rows, row_choice
from pallas_kernels import experts as kernels
from pallas_kernels import linear as one_row
from pallas_kernels.experts import Tiles
from pallas_kernels.quantized import unsupported_weight
from pallas_kernels.row_choice import Largest
from specjax.models.expert_tiles import share_no_tiles, sizes_of_tiles, tiles_of
from specjax.models.layer import ACTIVATIONS, Params, Shapes, Sublayer, matrix_shape, norm_of, times
from specjax.models.linear import NORMED_ROWS, Norm, linear, rms_norm, with_scale
from specjax.models.quantized import Quantized, dequantize
from specjax.operations.dispatch import dispatch, has_static_shape
from specjax.parallel.links import sum_over
from specjax.parallel.loops import as_carry
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

MIN_TILE, MAX_TILE = 8, 256  # rows of an expert that XLA multiplies at a time
FEW_PAIRS = 16  # pairs of a row and an expert that kernels multiply apart even if pairs share experts; codes of 4 bits
MIN_SUM = 1e-12  # the least sum that weights are divided by; corrections may choose experts without probability
FEW_ROWS = 64  # rows whose largest scores are found by comparing each with each
Chosen = tuple[Array, Array]  # experts [T, k] int32 of each row, and their weights [T, k] float32


class Router(Protocol):
    """The choice of experts for each token, a frozen dataclass."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_chosen(self) -> int: ...
    @property
    def has_kernel(self) -> bool:
        """Whether the choice of few rows consists of operations by element, broadcasts and reductions."""
        ...

    def shapes(self) -> Shapes:
        """Return the shapes of the parameters beside the matrix "router" [experts, hidden size]."""
        ...

    def __call__(self, params: Params, logits: Array, largest: Largest = ...) -> Chosen:
        """Choose from logits [T, experts] float32; of equal experts the one with the lower index comes first.

        A kernel brings its function `largest`, which may fill a row with places that no expert has.
        """
        ...


def _largest(scores: Array, number: int) -> tuple[Array, Array]:
    """Return the largest scores [T, number] of each row, and their places [T, number] int32.

    The lower place comes first among equal scores. NaN is below every number.
    """
    num_rows = scores.shape[0]
    if not isinstance(num_rows, int) or num_rows > FEW_ROWS:  # a symbolic number cannot be compared
        return jax.lax.top_k(jnp.where(jnp.isnan(scores), -jnp.inf, scores), number)
    # On GPUs a few comparisons of all pairs take less time than a sort.
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    place = jax.lax.iota(jnp.int32, scores.shape[1])
    this, other = scores[:, :, None], scores[:, None]
    is_before = (other > this) | ((other == this) & (place[None, None] < place[None, :, None]))
    rank = jnp.sum(is_before, axis=2, dtype=jnp.int32)
    is_at = rank[:, None] == jax.lax.iota(jnp.int32, number)[None, :, None]  # [T, number, E]
    best = jnp.max(jnp.where(is_at, scores[:, None], -jnp.inf), axis=2)
    return best, jnp.sum(jnp.where(is_at, place[None, None], 0), axis=2, dtype=jnp.int32)


def _at(values: Array, experts: Array) -> Array:
    """Return the values [T, k] of experts [T, k], from the values [T, E] of all, without a gather."""
    place = jax.lax.iota(jnp.int32, values.shape[1])
    return jnp.sum(jnp.where(experts[:, :, None] == place[None, None], values[:, None], 0), axis=2)


def _check_choice(num_experts: int, num_chosen: int) -> None:
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"num_chosen must be in [1, num_experts = {num_experts}], got {num_chosen}")


@dataclass(frozen=True)
class SoftmaxTopK:
    """Choose the experts with the largest probabilities, as Qwen3-MoE and Mixtral do.

    Raises:
        ValueError: `num_chosen` is not in [1, num_experts].
    """

    num_experts: int
    num_chosen: int
    is_renormalized: bool = True  # whether the weights of the chosen experts are divided by their sum
    has_scales: bool = False  # whether the weights are then multiplied by a number of each expert, as in Gemma 4
    has_corrections: bool = False  # whether a number of each expert is added for the choice, as in ERNIE 4.5
    has_kernel = True

    def __post_init__(self):
        _check_choice(self.num_experts, self.num_chosen)

    def shapes(self) -> Shapes:
        shapes: Shapes = {"router_scale": (self.num_experts,)} if self.has_scales else {}
        return shapes | ({"router_correction": (self.num_experts,)} if self.has_corrections else {})

    def __call__(self, params: Params, logits: Array, largest: Largest = _largest) -> Chosen:
        probabilities, scores = jax.nn.softmax(logits, axis=-1), logits
        if self.has_corrections:
            scores = probabilities + params["router_correction"].astype(jnp.float32)[None]
        # Probabilities that underflow are equal; their logits are not.
        _, experts = largest(scores, self.num_chosen)
        weights = _at(probabilities, experts)
        if self.is_renormalized:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), MIN_SUM)
        if self.has_scales:
            weights = weights * _at(params["router_scale"].astype(jnp.float32)[None], experts)
        return experts, weights


@dataclass(frozen=True)
class TopKSoftmax:
    """Choose the experts with the largest logits plus biases; a softmax over these alone gives weights (gpt-oss).

    Raises:
        ValueError: `num_chosen` is not in [1, num_experts].
    """

    num_experts: int
    num_chosen: int
    has_kernel = True

    def __post_init__(self):
        _check_choice(self.num_experts, self.num_chosen)

    def shapes(self) -> Shapes:
        return {"router_bias": (self.num_experts,)}

    def __call__(self, params: Params, logits: Array, largest: Largest = _largest) -> Chosen:
        best, experts = largest(logits + params["router_bias"].astype(jnp.float32)[None], self.num_chosen)
        return experts, jax.nn.softmax(best, axis=-1)


@dataclass(frozen=True)
class TopKSigmoid:
    """Choose the experts with the largest logits, whose sigmoids are weights, as Llama 4 does.

    Raises:
        ValueError: `num_chosen` is not in [1, num_experts].
    """

    num_experts: int
    num_chosen: int
    is_renormalized: bool = False  # whether the weights of the chosen experts are divided by their sum
    has_kernel = True

    def __post_init__(self):
        _check_choice(self.num_experts, self.num_chosen)

    def shapes(self) -> Shapes:
        return {}

    def __call__(self, params: Params, logits: Array, largest: Largest = _largest) -> Chosen:
        best, experts = largest(logits, self.num_chosen)
        weights = jax.nn.sigmoid(best)
        if self.is_renormalized:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), MIN_SUM)
        return experts, weights


@dataclass(frozen=True)
class SparseMixer:
    """Choose the expert with the largest logit, then the next one, as Phi-3.5-MoE does.

    The weight of each is its probability among itself and those after it whose logits are near: their distance is at
    most `nearness` times their own magnitude or the larger logit.

    Raises:
        ValueError: `num_chosen` is not in [1, num_experts].
    """

    num_experts: int
    num_chosen: int = 2
    nearness: float = 0.02
    has_kernel = False

    def __post_init__(self):
        _check_choice(self.num_experts, self.num_chosen)

    def shapes(self) -> Shapes:
        return {}

    def __call__(self, params: Params, logits: Array, largest: Largest = _largest) -> Chosen:
        best, experts = largest(logits, self.num_chosen)
        best, place = best[:, :, None], jax.lax.iota(jnp.int32, logits.shape[1])[None, None]
        distance, size = best - logits[:, None], jnp.maximum(jnp.abs(logits)[:, None], best)
        rank = jax.lax.iota(jnp.int32, best.shape[1])
        is_before = rank[None, :, None, None] > rank[None, None, :, None]
        is_taken = (experts[:, None, :, None] == place[:, None]) & is_before  # [T, k, k, E]
        num_taken = jnp.sum(is_taken, axis=2, dtype=jnp.int32)  # by the experts before each
        counts = (num_taken == 0) & (distance <= self.nearness * size)
        return experts, 1 / jnp.sum(jnp.where(counts, jnp.exp(-distance), 0), axis=2)


@dataclass(frozen=True)
class SigmoidTopK:
    """Choose by sigmoids plus corrections, inside the best groups of experts, as DeepSeek V3 and GLM-4.5 do.

    The score of a group is the sum of its two largest corrected sigmoids. Weights are sigmoids without corrections.

    Raises:
        ValueError: `num_chosen` is not in [1, num_experts], or the experts cannot be in such groups.
    """

    num_experts: int
    num_chosen: int
    is_renormalized: bool = True  # whether the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # factor on the weights
    num_groups: int = 1
    num_chosen_groups: int = 1
    epsilon: float = 1e-20  # added to the sum that weights are divided by

    def __post_init__(self):
        _check_choice(self.num_experts, self.num_chosen)
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts = {self.num_experts}, got {self.num_groups}")
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            expected = f"in [1, num_groups = {self.num_groups}]"
            raise ValueError(f"num_chosen_groups must be {expected}, got {self.num_chosen_groups}")
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            raise ValueError(f"num_groups must leave 2 experts or more for each group, got {self.num_groups}")
        if self.num_chosen > size * self.num_chosen_groups:
            raise ValueError(
                f"num_chosen must be at most {size * self.num_chosen_groups}, the experts of num_chosen_groups = "
                f"{self.num_chosen_groups}, got {self.num_chosen}"
            )

    @property
    def has_kernel(self) -> bool:
        return self.num_chosen_groups == self.num_groups

    def shapes(self) -> Shapes:
        return {"router_correction": (self.num_experts,)}

    def __call__(self, params: Params, logits: Array, largest: Largest = _largest) -> Chosen:
        scores = jax.nn.sigmoid(logits)
        corrected = scores + params["router_correction"].astype(jnp.float32)[None]
        if self.num_chosen_groups < self.num_groups:
            grouped = corrected.reshape(corrected.shape[0], self.num_groups, -1)
            of_group = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            _, best = jax.lax.top_k(of_group, self.num_chosen_groups)
            is_kept = jnp.any(best[:, :, None] == jnp.arange(self.num_groups, dtype=best.dtype)[None, None], axis=1)
            corrected = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(corrected.shape)
        _, experts = largest(corrected, self.num_chosen)
        weights = _at(scores, experts)
        if self.is_renormalized:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + self.epsilon)
        return experts, weights * self.scale


@dataclass(frozen=True)
class Gated:
    """The function activation(gate) * up of an expert."""

    activation: str = "silu"  # one of ACTIVATIONS
    num_parts = 2

    def __call__(self, gate: Array, up: Array) -> Array:
        return ACTIVATIONS[self.activation](gate) * up


@dataclass(frozen=True)
class Ungated:
    """The function activation(up) of an expert that has no gate."""

    activation: str = "relu2"  # one of ACTIVATIONS
    num_parts = 1

    def __call__(self, up: Array) -> Array:
        return ACTIVATIONS[self.activation](up)


@dataclass(frozen=True)
class ClippedGated:
    """The function gate * sigmoid(slope * gate) * (up + 1) of an expert, of clipped inputs, as gpt-oss has it."""

    limit: float = 7.0  # largest gate, and largest magnitude of `up`
    slope: float = 1.702
    num_parts = 2

    def __call__(self, gate: Array, up: Array) -> Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.slope * gate) * (up + 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beside:
    """The matrices of an MLP that every token passes through, and the factor on its output."""

    gate_up: Any  # floats or a `Quantized`
    out: Any
    factor: Array  # [T, 1] float32


@dataclass(frozen=True)
class Shared:
    """An MLP that every token passes through beside its experts, of the width `shared_size` of the config."""

    activation: str = "silu"  # of the gate, one of ACTIVATIONS
    is_gated: bool = False  # whether its output is multiplied by the sigmoid of a product with the input
    num_parts: int = 2  # gate and up projection, or the latter alone

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters by name."""
        hidden, size = config.hidden_size, config.shared_size
        shapes = {
            "shared_gate_up": matrix_shape(config, hidden, self.num_parts * size),
            "shared_out": matrix_shape(config, size, hidden),
        }
        return shapes | {"shared_gate": (1, hidden)} if self.is_gated else shapes

    @property
    def gate(self) -> "Gated | Ungated":
        """The function of its projections, as of an expert."""
        return Gated(self.activation) if self.num_parts == 2 else Ungated(self.activation)

    def __call__(self, own: Beside, x: Array, *, transposed: bool, implementation: str | None = None) -> Array:
        """Return the output [T, h] in float32, of which each device has a summand.

        Args:
            own: the matrices, and the factor on the output.
            x: [B, T / B, h].
            transposed: whether matrices of floats are [outputs, inputs].
            implementation: of the products, as `linear` takes it.
        """
        product = partial(linear, transposed=transposed, implementation=implementation)
        first, activation = partial(product, x, own.gate_up), ACTIVATIONS[self.activation]
        inner = first(activation=activation) if self.num_parts == 2 else activation(first())
        y = product(inner, own.out)
        return own.factor * y.reshape(-1, y.shape[-1]).astype(jnp.float32)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, each an MLP of the width `expert_size` of the config.

    Raises:
        ValueError: weights multiply inputs, and a token has several experts; or `shared` is gated, and the router reads
            the stream after another norm.
    """

    router: Router
    gate: Gated | ClippedGated | Ungated = Gated()  # function of an expert's gate and up projections, or of the latter
    has_bias: bool = False  # whether the projections of experts have biases
    # Whether the outputs of gate and up alternate, as gpt-oss stores them; otherwise all gates come first.
    is_interleaved: bool = False
    shared: Shared | None = None
    # Whether the router reads the stream after another norm, times hidden_size ** -0.5, as in Gemma 4.
    has_router_norm: bool = False
    # Numbers of a token that experts read and give, with a projection before and after; None: hidden_size.
    latent_size: int | None = None
    # Whether the weight of the one expert of a token multiplies its input, as in Llama 4, and not its output.
    weighs_inputs: bool = False
    factor: float = 1.0  # on the sum of the outputs of experts and of `shared`

    def __post_init__(self):
        if self.weighs_inputs and self.router.num_chosen != 1:
            raise ValueError(f"num_chosen must be 1 where weights multiply inputs, got {self.router.num_chosen}")
        if self.has_router_norm and self.shared is not None and self.shared.is_gated:
            raise ValueError("shared.is_gated must be False where the router has another norm, got True")

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters by name. The matrices of experts are [experts, outputs, inputs]."""
        number, hidden, size = self.router.num_experts, config.hidden_size, config.expert_size
        first, read = self.gate.num_parts * size, hidden if self.latent_size is None else self.latent_size
        shapes: Shapes = {
            "router": (number, hidden),
            "experts_gate_up": (number, first, read),
            "experts_out": (number, read, size),
        }
        if self.has_bias:
            shapes |= {"experts_gate_up_bias": (number, first), "experts_out_bias": (number, read)}
        if self.latent_size is not None:
            shapes["latent_in"] = matrix_shape(config, hidden, read)
            shapes["latent_out"] = matrix_shape(config, read, hidden)
        if self.has_router_norm:
            shapes["router_norm"] = (hidden,)
        return shapes | self.router.shapes() | ({} if self.shared is None else self.shared.shapes(config))

    def __call__(self, config: "DecoderConfig", params: Params, call: Sublayer) -> Array:
        """Return the residual stream after the mixture [B, T, h]."""
        rows, logits, factor = self._read(config, params, call)
        x = rows.reshape(call.x.shape)
        if self.latent_size is not None:
            rows = linear(rows[None], params["latent_in"], transposed=config.transposed)[0]
        beside = None if self.shared is None else Beside(params["shared_gate_up"], params["shared_out"], factor)
        joined = beside if beside is not None and self.is_joined(params, rows, beside) else None
        y, experts, weights = self.route(params, rows, logits, beside=joined)
        if self.latent_size is not None:
            y = linear(y[None].astype(x.dtype), params["latent_out"], transposed=config.transposed)[0]
        if self.shared is not None and beside is not None and joined is None:
            y = y + self.shared(beside, x, transposed=config.transposed)
        y = y.reshape(x.shape).astype(x.dtype)
        if config.axis_name is not None:
            y = sum_over(y, config.axis_name, params.get("links"), after=call.residual)
        if self.has_bias:
            biases = params["experts_out_bias"][experts].astype(jnp.float32)
            y = y + jnp.sum(biases * weights[..., None], axis=1).reshape(x.shape).astype(x.dtype)
        y = y if self.factor == 1 else times(y, self.factor)
        return call.residual + (y if call.finish is None else call.finish(y))

    def _read(self, config: "DecoderConfig", params: Params, call: Sublayer) -> tuple[Array, Array, Array]:
        """Return the input [T, h] of the experts, the logits [T, experts] of the router, and the factor on `shared`."""
        rows = call.x.reshape(-1, call.x.shape[-1])
        if self.has_router_norm:
            x = times(rms_norm(rows, norm_of(params["router_norm"], config)), config.hidden_size**-0.5)
            _, logits, _ = normed_and_logits(params["router"], x)
            rows, of_factor = rows if call.norm is None else rms_norm(rows, call.norm), None
        else:
            more = params["shared_gate"] if self.shared is not None and self.shared.is_gated else None
            rows, logits, of_factor = normed_and_logits(params["router"], rows, call.norm, more=more)
        factor = jnp.ones((rows.shape[0], 1), jnp.float32) if of_factor is None else jax.nn.sigmoid(of_factor)
        return rows, logits, factor

    def is_joined(self, params: Params, x: Array, beside: Beside) -> bool:
        """Return whether kernels multiply rows x [T, h] by `beside` as by the matrices of one more expert of each."""
        if self.shared is None or self.has_bias or self.weighs_inputs or self.latent_size is not None:
            return False
        gate_up, out = params["experts_gate_up"], params["experts_out"]
        if not isinstance(gate_up, Quantized) or not isinstance(out, Quantized) or self.gate != self.shared.gate:
            return False
        if not _is_like_expert(gate_up, beside.gate_up) or not _is_like_expert(out, beside.out):
            return False
        return has_static_shape(x) and self._is_by_rows(len(x), gate_up, out)

    def mix(
        self, params: Params, x: Array, experts: Array, weights: Array, *, implementation: str | None = None
    ) -> Array:
        """Return the weighted sum of the products of chosen experts, without the biases of their outputs.

        Args:
            params: the matrices of experts.
            x: [T, h] floats.
            experts: [T, k] int32, the experts of each row, each once.
            weights: [T, k] float32.
            implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA for rows of 16 bits.

        Returns:
            [T, h] float32.

        Raises:
            NotImplementedError: if the named implementation does not support the case.
        """

        def reason(x: Array, experts: Array, weights: Array, gate_up: Array, bias: Array | None, out: Array):
            return self._unsupported(x, gate_up, out)

        return dispatch(
            (x, experts, weights, *self._matrices(params)),
            xla=self._by_xla,
            pallas=self._by_kernels,
            reason=reason,
            implementation=implementation,
        )

    def route(
        self,
        params: Params,
        x: Array,
        logits: Array,
        *,
        beside: Beside | None = None,
        implementation: str | None = None,
    ) -> tuple[Array, Array, Array]:
        """Choose experts for each row, and return the sum of `mix`, the experts and their weights.

        Args:
            params: the matrices of experts, and the vectors of the router.
            x: [T, h] floats.
            logits: [T, experts] float32.
            beside: the MLP `shared`, where it `is_joined`: its output is a part of the sum. None leaves it out.
            implementation: as `mix` takes it. The choice of few rows has a kernel, too.

        Raises:
            NotImplementedError: if the named implementation does not support the case.
            ValueError: `beside` is not joined, so that kernels would leave it out.
        """
        if beside is not None and not self.is_joined(params, x, beside):
            raise ValueError("beside must be None or an MLP that is_joined, got one that is not")
        vectors = {name: params[name] for name in self.router.shapes()}

        def by_xla(x: Array, logits: Array, vectors: Params, beside: Beside | None, *matrices: Any):
            experts, weights = self.router(vectors, logits)
            y = self._by_xla(*self._weighed(x, experts, weights), *matrices)
            if self.shared is not None and beside is not None:
                y = y + self.shared(beside, x[None], transposed=True, implementation="xla")
            return y, experts, weights

        def by_kernels(
            x: Array, logits: Array, vectors: Params, beside: Beside | None, *matrices: Any, interpret: bool
        ):
            experts, weights, tiles = self._choose(vectors, logits, interpret=interpret)
            operands = self._weighed(x, experts, weights)
            y = self._by_kernels(*operands, *matrices, interpret=interpret, tiles=tiles, beside=beside)
            return y, experts, weights

        def reason(
            x: Array,
            logits: Array,
            vectors: Params,
            beside: Beside | None,
            gate_up: Array,
            bias: Array | None,
            out: Array,
        ):
            return self._unsupported(x, gate_up, out)

        return dispatch(
            (x, logits, vectors, beside, *self._matrices(params)),
            xla=by_xla,
            pallas=by_kernels,
            reason=reason,
            implementation=implementation,
        )

    def _weighed(self, x: Array, experts: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Return the inputs of experts, the experts and the weights of their outputs, as `mix` takes them."""
        if not self.weighs_inputs:
            return x, experts, weights
        return times(x, weights), experts, jnp.ones_like(weights)

    def _unsupported(self, x: Array, gate_up: Array | Quantized, out: Array | Quantized) -> str | None:
        """Return why the kernels cannot compute the mixture of rows x, or None where they can."""
        if self.gate == Gated("gelu"):
            return "the kernels have no error function, got the activation gelu"
        return kernels.unsupported(x, gate_up) or kernels.unsupported(x, out)

    def _matrices(self, params: Params) -> tuple[Any, Array | None, Any]:
        bias = params["experts_gate_up_bias"] if self.has_bias else None
        return params["experts_gate_up"], bias, params["experts_out"]

    def _choose(self, vectors: Params, logits: Array, *, interpret: bool) -> tuple[Array, Array, Tiles | None]:
        """Return the experts of each row, their weights, and the tiles where a kernel has made them."""
        router = self.router
        if not router.has_kernel:
            return *router(vectors, logits), None
        if choice.unsupported(logits, router.num_chosen) is not None:
            if row_choice.unsupported(logits, router.num_chosen) is not None:
                return *router(vectors, logits), None
            return *row_choice.choose(logits, vectors, router, router.num_chosen, interpret=interpret), None
        sizes = logits.shape[0], router.num_chosen, router.num_experts
        num_tiles, size = sizes_of_tiles(*sizes, kernels.MIN_TILE, kernels.MAX_TILE)
        made = choice.choose(
            logits, vectors, router, router.num_chosen, num_tiles=num_tiles, size=size, interpret=interpret
        )
        return made

    def _by_kernels(
        self,
        x: Array,
        experts: Array,
        weights: Array,
        gate_up: Array | Quantized,
        bias: Array | None,
        out: Array | Quantized,
        *,
        interpret: bool,
        tiles: Tiles | None = None,
        beside: Beside | None = None,
    ) -> Array:
        """Return the sum of `mix`, with the output of `shared` if `beside` is given."""
        ungated = self.gate if isinstance(self.gate, Ungated) else None
        gate = self.gate if ungated is None else None
        last = {"dtype": jnp.float32, "interpret": interpret}
        first = last | {"bias": bias, "gate": gate, "is_interleaved": self.is_interleaved}
        if ungated is None:
            first["dtype"] = x.dtype

        def gated(inner: Array) -> Array:
            """Return the products after the function of an expert that has no gate, which the kernels leave out."""
            return inner if ungated is None else ungated(inner).astype(x.dtype)

        if isinstance(gate_up, Quantized) and isinstance(out, Quantized) and self._is_by_rows(len(x), gate_up, out):
            shared = (None, None, None) if beside is None else (beside.gate_up, beside.out, beside.factor)
            inner = gated(expert_rows.products(x, gate_up, experts, shared=shared[0], **first))
            y = expert_rows.products(inner, out, experts, shared=shared[1], **last)
            return _sum_of_chosen(y, weights, shared[2])
        if tiles is None:
            tiles = tiles_of(experts, self.router.num_experts, kernels.MIN_TILE, kernels.MAX_TILE)
        inner = gated(kernels.product(x, gate_up, tiles, is_gathered=True, **first))
        y = kernels.product(inner, out, tiles, is_gathered=False, **last)
        return _sum_of_chosen(y[tiles.place], weights)

    def _is_by_rows(self, num_rows: int, gate_up: Quantized, out: Quantized) -> bool:
        """Return whether each pair of a row and an expert is a product of one row, as few pairs are."""
        if share_no_tiles(num_rows, self.router.num_chosen, self.router.num_experts):
            return True
        return num_rows * self.router.num_chosen <= FEW_PAIRS and gate_up.bits == out.bits == 4

    def _by_xla(
        self,
        x: Array,
        experts: Array,
        weights: Array,
        gate_up_weight: Array | Quantized,
        bias: Array | None,
        out: Array | Quantized,
    ) -> Array:
        tiles = tiles_of(experts, self.router.num_experts, MIN_TILE, MAX_TILE)
        row = jnp.concatenate([tiles.row, jnp.zeros((tiles.num_rows,), jnp.int32)])
        # Tiles without rows write past the last place.
        start = jnp.where(tiles.count > 0, tiles.start, tiles.row.shape[0])

        def tile(index: Array | int, y: Array) -> Array:
            expert = tiles.expert[index]
            rows = x[jax.lax.dynamic_slice(row, (start[index],), (tiles.num_rows,))]
            gate_up = _rows_of_expert(rows, gate_up_weight, expert)
            if bias is not None:
                gate_up = gate_up + bias[expert].astype(jnp.float32)[None]
            inner = self.gate(*self.split(gate_up)).astype(x.dtype)
            # Rows past the last of the expert are written again by the tile that follows.
            return jax.lax.dynamic_update_slice(y, _rows_of_expert(inner, out, expert), (start[index], 0))

        y = jnp.zeros((row.shape[0], x.shape[1]), jnp.float32)
        y = as_carry(partial(tile, 0), y, x, gate_up_weight, bias, out, tiles)
        y = jax.lax.fori_loop(0, tiles.start.shape[0], tile, y)
        return _sum_of_chosen(y[tiles.place], weights)

    def split(self, gate_up: Array) -> tuple[Array, ...]:
        """Return the gate and the up projection [..., I] in outputs [..., 2 I] of the first matrix, or the latter."""
        if self.gate.num_parts == 1:
            return (gate_up,)
        if self.is_interleaved:
            return gate_up[..., 0::2], gate_up[..., 1::2]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return gate, up


def normed_and_logits(
    router: Array | Quantized,
    x: Array,
    norm: Norm | None = None,
    *,
    more: Array | Quantized | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return rows after their norm, and a router's logits of them, in float32 whatever the dtype of the model is.

    A router compares each logit with each. XLA may make the sum of a product's parts a part of the comparison, once for
    each side of it and in another order. A number then differs from itself, two experts share a rank, and no expert has
    another. The barrier keeps the logits in memory, so that both sides read the same numbers.

    Args:
        router: [experts, h].
        x: [T, h] floats.
        norm: of the rows; None for none.
        more: [M, h], a second matrix of a few rows; None for none.
        implementation: "xla", "pallas", "interpret", or None: the kernel on CUDA for a few rows of 16 bits.

    Returns:
        The rows [T, h] after their norm, the logits [T, experts] float32, and the products [T, M] float32 with the
        second matrix, or None.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
    """

    def floats(matrix: Array | Quantized) -> Array:
        return dequantize(matrix) if isinstance(matrix, Quantized) else matrix.astype(jnp.float32)

    def by_xla(x: Array, router: Array | Quantized, scale: Array | None, more: Array | Quantized | None) -> Any:
        before = with_scale(norm, scale)
        x = x if before is None else rms_norm(x, before)
        x32 = x.astype(jnp.float32)
        logits = jnp.einsum("th,eh->te", x32, floats(router), precision=jax.lax.Precision.HIGHEST)
        # As a sum it joins other operations of XLA, whose product of a few rows by one output takes long on GPUs.
        return x, logits, None if more is None else jnp.sum(x32[:, None] * floats(more)[None], axis=2)

    def by_kernel(x: Array, router: Array, scale: Array | None, more: Array | None, *, interpret: bool):
        options = {"more": more, "dtype": jnp.float32, "interpret": interpret}
        logits, products, rows = one_row.linear_after_norm(x, router, with_scale(norm, scale), **options)
        return rows, logits, products

    def reason(x: Array, router: Array | Quantized, scale: Array | None, more: Array | Quantized | None) -> str | None:
        if isinstance(router, Quantized) or isinstance(more, Quantized) or x.dtype == jnp.float32:
            return "the kernel takes rows and a router of 16 bits, so that in float32 no logit depends on other rows"
        if x.shape[0] > NORMED_ROWS:
            return f"the kernel takes at most {NORMED_ROWS} rows, got {x.shape[0]}"
        of_more = None if more is None else one_row.unsupported(x[0], more)
        return of_more or one_row.unsupported(x[0], router)

    normed, logits, products = dispatch(
        (x, router, None if norm is None else norm.scale, more),
        xla=by_xla,
        pallas=by_kernel,
        reason=reason,
        implementation=implementation,
    )
    return normed, jax.lax.optimization_barrier(logits), products


def _is_like_expert(experts: Quantized, shared: Array | Quantized) -> bool:
    """Return whether kernels multiply a matrix [N, K] as one of the experts' [E, N, K]."""
    if not isinstance(shared, Quantized) or unsupported_weight(shared) is not None:
        return False
    return (experts.bits, experts.code, experts.shape[1:]) == (shared.bits, shared.code, shared.shape)


def _sum_of_chosen(y: Array, weights: Array, factor: Array | None = None) -> Array:
    """Return the weighted sum [T, h] of the products y [P, h] of each row's pairs.

    The first k pairs of a row are of its chosen experts. With a factor [T, 1], it has another one.
    """
    (num_rows, num_chosen), size = weights.shape, y.shape[-1]
    pairs = y.reshape(num_rows, -1, size)
    total = jnp.sum(pairs[:, :num_chosen] * weights[..., None], axis=1)
    return total if factor is None else total + factor * pairs[:, num_chosen]


def _rows_of_expert(x: Array, weights: Array | Quantized, expert: Array) -> Array:
    """Return the products [R, N] float32 of rows [R, K] with the matrix of one expert."""
    if isinstance(weights, Quantized):
        own = weights[expert]
        order, own = own.order, own.replace(order=None)
        x = x if order is None else x[:, order]
        weight = dequantize(own, x.dtype)
    else:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
    return jnp.einsum("rk,nk->rn", x, weight, preferred_element_type=jnp.float32)
