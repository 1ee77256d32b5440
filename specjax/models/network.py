"""Turn a network into a `Model`: pure functions of its parameters, a nested dict.

The functions are frozen dataclasses that compare by value, so a model that is built again does not retrace.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.models.linear import lookup
from specjax.models.quantized import Quantized
from specjax.operations.groups import is_ragged, split
from specjax.parallel import OnMesh, of_one_device, shards
from specjax.parallel.links import sum_over
from specjax.types import Array, Features, Model, ModelInput, ModelOutput, PyTree
from specjax.validation import is_integer


class NetworkConfig(Protocol):
    """Fields that every network's config has; a config is a frozen dataclass."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...


@dataclass(frozen=True)
class Network:
    """The functions of a network; both are pure."""

    init: Callable[[Any, int], PyTree]  # (config, seed) -> random parameters, a nested dict
    apply: Callable[..., tuple[ModelOutput, Any]]  # (config, params, inputs, cache, feature_layers) -> (output, cache)


def init_params(network: Network, config: NetworkConfig, seed: int) -> PyTree:
    """Return random float32 parameters, a nested dict with the names and shapes of `param_shapes`."""
    params = network.init(config, seed)
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)  # with jax_enable_x64 some are drawn in float64


def param_shapes(network: Network, config: NetworkConfig) -> PyTree:
    """Return the names, shapes and dtypes of the parameters: a nested dict of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(lambda: network.init(config, 0))


@dataclass(frozen=True)
class Apply:
    """`Model.apply` for a network, which returns the residual stream at `feature_layers` in `Features.taps`."""

    network: Network
    config: NetworkConfig
    feature_layers: tuple[int, ...] = ()

    def __call__(self, params: PyTree, inputs: ModelInput, cache: list | None) -> tuple[ModelOutput, list | None]:
        return self.network.apply(self.config, params, inputs, cache, self.feature_layers)


class Taps:
    """The residual stream at some layers, collected while a network runs its layers one after another."""

    def __init__(self, layers: tuple[int, ...]):
        self._layers = layers
        self._collected: dict[int, Array] = {}

    def collect(self, layer: int, x: Array) -> None:
        """Keep the stream x [B, T, H] before the first layer (0) or after so many layers, if it was asked for."""
        if layer in self._layers:
            self._collected[layer] = x

    def beside(self, hidden: Array) -> Features:
        """Return the collected taps beside the final hidden state [B, T, H]."""
        streams = [self._collected[layer] for layer in self._layers]
        return Features(hidden, jnp.concatenate(streams, axis=-1) if streams else None)


@dataclass(frozen=True)
class InitCache:
    """`Model.init_cache` for a network: for each layer, keys and values [B, S, kv heads, head size] of zeros.

    Given the number of pages and their size, it makes a pool. Layers that do not attend have none.
    """

    config: NetworkConfig
    dtype: str
    attends: tuple[bool, ...] | None = None  # whether each layer keeps keys and values; None: all do
    sizes: tuple[tuple[int, int], ...] | None = None  # number of kv heads of each layer, and their size; None: equal

    def __call__(self, batch_size: int, max_length: int) -> list[dict[str, Array]]:
        number = self.config.num_layers
        sizes = ((self.config.num_kv_heads, self.config.head_size),) * number if self.sizes is None else self.sizes
        attends = (True,) * number if self.attends is None else self.attends

        def zeros(size: tuple[int, int]) -> Array:
            return jnp.zeros((batch_size, max_length, *size), self.dtype)

        each = zip(attends, sizes, strict=True)
        return [{"key": zeros(size), "value": zeros(size)} if one else {} for one, size in each]


def network_model(network: Network, config: NetworkConfig, params: PyTree, feature_layers: Sequence[int] = ()) -> Model:
    """Return the `Model` of a network with these parameters.

    Args:
        network: the functions of the network.
        config: its config.
        params: its parameters. They include `embedding`, whose dtype the cache takes.
        feature_layers: as `with_feature_layers` takes them.
    """
    model = Model(
        params=params,
        apply=Apply(network, config),
        init_cache=InitCache(config, str(params["embedding"].dtype)),
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        takes_pages=True,
        takes_groups=True,
        takes_ragged=True,
    )
    return with_feature_layers(model, feature_layers)


def with_feature_layers(model: Model, feature_layers: Sequence[int]) -> Model:
    """Return a built-in model that gives the residual stream at some layers to proposers, in `Features.taps`.

    The weights are shared. Layers that nobody asked for cost nothing.

    Args:
        model: a model of `models.load` or `decoder_model`.
        feature_layers: layers in [0, number of layers], in the order that the proposer wants them side by side. 0 is
            the embeddings, j the stream after j layers, before the final norm.

    Raises:
        ValueError: a layer is out of range, or the model is none of the built-in ones.

    Example:
        >>> from specjax import models
        >>> model = models.load(models.EMBEDDED / "draft")
        >>> models.with_feature_layers(model, [0, 2]).feature_layers
        (0, 2)
    """
    if not isinstance(feature_layers, Iterable):
        raise ValueError(f"feature_layers must be a sequence of layers, got {feature_layers!r}")
    if not isinstance(model, Model):
        raise ValueError(f"model must be a specjax.Model, got {type(model).__name__}")
    layers = tuple(feature_layers)
    apply = of_one_device(model)
    if not isinstance(apply, Apply):
        raise ValueError(f"model must be one that specjax built, to give its residual stream, got {model.apply!r}")
    most = apply.config.num_layers
    if not all(is_integer(layer) and 0 <= layer <= most for layer in layers):
        raise ValueError(f"feature_layers must be in [0, {most}], the number of layers, got {list(feature_layers)!r}")
    layers = tuple(int(layer) for layer in layers)
    apply = replace(apply, feature_layers=layers)
    apply = replace(model.apply, apply=apply) if isinstance(model.apply, OnMesh) else apply
    return replace(model, apply=apply, feature_layers=layers)


def by_group(inputs: ModelInput, hidden: Array, head: Callable[[Array], Array]) -> Array:
    """Return the logits [B, T, V] of hidden states [B, T, H], with a product for each group of a call.

    The compiler leaves a product out where nothing reads the logits of its group. A ragged call has one product.
    """
    if inputs.groups is None or is_ragged(inputs):
        return head(hidden)
    return jnp.concatenate([head(part) for part in split(inputs, hidden)], axis=1)


def embed(table: Array | Quantized, tokens: Array, axis_name: str | None, links: Array | None = None) -> Array:
    """Return the rows [B, T, D] of an embedding table [V, D] for tokens [B, T]; devices may share the vocabulary."""
    if axis_name is None:
        return lookup(table, tokens)
    size = table.shape[0]
    index = tokens - shards.first_id(size, axis_name)
    is_own = (index >= 0) & (index < size)
    own = jnp.where(is_own[..., None], lookup(table, jnp.where(is_own, index, 0)), 0)
    return sum_over(own, axis_name, links)


def without_padding(logits: Array, num_padding: int, axis_name: str | None) -> Array:
    """Return this device's logits [B, T, V] with -inf for the last `num_padding` ids of all devices."""
    if not num_padding:
        return logits
    size = logits.shape[-1]
    ids = shards.first_id(size, axis_name) + jnp.arange(size, dtype=jnp.int32)
    return jnp.where((ids < size * shards.num_shards(axis_name) - num_padding)[None, None], logits, -jnp.inf)
