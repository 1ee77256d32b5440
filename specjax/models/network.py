"""Turn a Flax NNX network into a `Model`: pure functions of its parameters, a nested dict.

The functions are frozen dataclasses that compare by value, so a model that is built again does not retrace.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.types import Array, Model, ModelInput, ModelOutput, PyTree


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


# The class of a network, an nnx.Module: Network(config, rngs)(inputs, cache) -> (ModelOutput, cache).
Network = Callable[[Any, nnx.Rngs], nnx.Module]


@cache
def _abstract(network: Network, config: NetworkConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graph of a network and its state of shapes, without allocating parameters."""
    return nnx.split(nnx.eval_shape(lambda: network(config, nnx.Rngs(0))))


def init_params(network: Network, config: NetworkConfig, seed: int) -> PyTree:
    """Return random float32 parameters, a nested dict with the names and shapes of `param_shapes`."""
    return nnx.to_pure_dict(nnx.split(network(config, nnx.Rngs(seed)))[1])


def param_shapes(network: Network, config: NetworkConfig) -> PyTree:
    """Return the names, shapes and dtypes of the parameters: a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(_abstract(network, config)[1])


@dataclass(frozen=True)
class Apply:
    """`Model.apply` for a network."""

    network: Network
    config: NetworkConfig

    def __call__(self, params: PyTree, inputs: ModelInput, cache: list | None) -> tuple[ModelOutput, list | None]:
        graph, state = _abstract(self.network, self.config)
        state = jax.tree.map(lambda x: x, state)  # a copy: the cached state is shared by all calls
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(inputs, cache)


@dataclass(frozen=True)
class InitCache:
    """`Model.init_cache` for a network: for each layer, keys and values [B, S, kv heads, head size] of zeros.

    Given the number of pages and their size, it makes a pool.
    """

    config: NetworkConfig
    dtype: str

    def __call__(self, batch_size: int, max_length: int) -> list[dict[str, Array]]:
        shape = (batch_size, max_length, self.config.num_kv_heads, self.config.head_size)
        return [
            {"key": jnp.zeros(shape, self.dtype), "value": jnp.zeros(shape, self.dtype)}
            for _ in range(self.config.num_layers)
        ]


def network_model(network: Network, config: NetworkConfig, params: PyTree) -> Model:
    """Return the `Model` of a network with these parameters.

    Args:
        network: class of the network.
        config: its config.
        params: its parameters. They include `embedding`, whose dtype the cache takes.
    """
    return Model(
        params=params,
        apply=Apply(network, config),
        init_cache=InitCache(config, str(params["embedding"].dtype)),
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        takes_pages=True,
    )
