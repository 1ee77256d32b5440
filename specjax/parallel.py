"""Models that the devices along one axis of a mesh share, each with a part of the weights, the cache and the logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from specjax.types import Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class OnMesh:
    """`Model.apply` of a model whose parameters and caches the devices along one axis of a mesh share.

    Called as any `apply`, it gives the logits of the whole vocabulary, spread over the devices. `decode.step` calls
    `on_devices` instead, and there the logits are never put together.
    """

    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]  # of one device, for its parts
    init_cache: Callable[[int, int], PyTree]  # of one device
    mesh: Mesh
    axis_name: str
    param_specs: tuple[P, ...]  # of the leaves of the parameters, in their order
    cache_spec: P  # of every leaf of the cache
    vocab_size: int

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        def call(params: PyTree, cache: PyTree, inputs: ModelInput) -> tuple[PyTree, tuple[Any, Any]]:
            output, cache = self.apply(params, inputs, cache)
            return cache, (output.logits, output.features)

        logits_spec = P(None, None, self.axis_name)
        cache, (logits, features) = self.run(call, params, cache, inputs, (logits_spec, P()))
        return ModelOutput(logits[..., : self.vocab_size], features), cache

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that every device holds whole."""
        return NamedSharding(self.mesh, P())

    @property
    def of_cache(self) -> NamedSharding:
        """The sharding of the leaves of a cache."""
        return NamedSharding(self.mesh, self.cache_spec)

    def run(self, function: Callable, params: PyTree, cache: PyTree, operands: Any, out: Any) -> tuple[Any, Any]:
        """Run `function(params, cache, operands) -> (cache, result)` on every device with its parts.

        The operands are whole on every device; `out` says how the result is spread over them.
        """
        param_specs = jax.tree.unflatten(jax.tree.structure(params), self.param_specs)
        # Every device computes the same numbers from exchanges that are exact; JAX cannot see that they are the same.
        run = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(param_specs, self.cache_spec, P()),
            out_specs=(self.cache_spec, out),
            check_vma=False,
        )
        return run(params, cache, operands)


def put(tree: PyTree, sharding: Sharding | PyTree) -> PyTree:
    """Return `jax.device_put(tree, sharding)`, also where other processes have some of the devices.

    Every process must give the same arrays, and puts its devices' parts of them there.
    """

    def put_one(x: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda x: put_one(x, sharding), tree)
    return jax.tree.map(put_one, tree, sharding)


def on_devices(model: Model, function: Callable, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
    """Run `function(model, cache, operands) -> (cache, result)` on every device of a model that `OnMesh` applies.

    The function gets the part of the model and of its cache that is on its device, and the operands whole; the result
    must be the same on every device.
    """
    shared = model.apply
    assert isinstance(shared, OnMesh), "only such a model is on a mesh"
    own = {"apply": shared.apply, "init_cache": shared.init_cache, "axis_name": shared.axis_name}

    def run(params: PyTree, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        return function(replace(model, params=params, **own), cache, operands)

    return shared.run(run, model.params, cache, operands, P())
