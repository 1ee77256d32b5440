"""Models that the devices of a mesh share, along two axes of it.

Along one axis each device has a part of the weights, the cache and the logits. Along the other each has some rows of
the batch, and with them their part of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from specjax.types import Array, Memory, Model, ModelInput, ModelOutput, PyTree

WHOLE = P()  # arrays that every device has whole


@dataclass(frozen=True)
class OnMesh:
    """`Model.apply` of a model whose parameters, caches and rows the devices of a mesh share.

    Called as any `apply`, it gives the logits of the whole vocabulary, spread over the devices. `decode.step` calls
    `on_devices` instead, and there the logits are never put together.
    """

    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]  # of one device, for its parts
    init_cache: Callable[[int, int], PyTree]  # of one device
    mesh: Mesh
    axis_name: str | None  # the axis whose devices share the weights; None where each has them whole
    param_specs: tuple[P, ...]  # of the leaves of the parameters, in their order
    cache_spec: P  # of every leaf of the cache
    vocab_size: int
    batch_axis: str | None = None  # the axis whose devices share the rows; None where each has them all
    has_slots: bool = False  # whether the leaves of a cache of shared rows are known to be [B, slots, ...]
    init_rows: Callable[[int], PyTree] | None = None  # of one device; None where the model keeps slots alone
    row_specs: tuple[P, ...] = ()  # of the leaves that `init_rows` returns, in their order

    def __call__(self, params: PyTree, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
        def call(params: PyTree, cache: PyTree, inputs: ModelInput) -> tuple[PyTree, tuple[Any, Any]]:
            output, cache = self.apply(params, inputs, cache)
            return cache, (output.logits, output.features)

        self.check_batch(inputs.tokens.shape[0])
        out = P(self.batch_axis, None, self.axis_name), self.of_rows
        cache, (logits, features) = self.run(call, params, cache, inputs, out, self.of_rows)
        return ModelOutput(logits[..., : self.vocab_size], features), cache

    @property
    def of_rows(self) -> P:
        """How the devices share arrays with a row for each sequence."""
        return WHOLE if self.batch_axis is None else P(self.batch_axis)

    @property
    def num_row_groups(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return 1 if self.batch_axis is None else self.mesh.shape[self.batch_axis]

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that every device holds whole."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def of_cache(self) -> NamedSharding:
        """The sharding of the leaves of a cache."""
        return NamedSharding(self.mesh, self.cache_spec)

    def specs_of(self, cache: PyTree) -> PyTree:
        """Return how the devices share a cache or a memory, which may have rows: specs of it or of parts of it."""
        if self.init_rows is None or not isinstance(cache, Memory):
            return self.cache_spec
        return Memory(self.cache_spec, jax.tree.unflatten(jax.tree.structure(cache.rows), self.row_specs))

    def check_batch(self, batch_size: int) -> None:
        """Raise ValueError unless the devices can share so many rows equally."""
        if batch_size % self.num_row_groups:
            raise ValueError(
                f"the batch must be a multiple of the {self.num_row_groups} devices along the axis "
                f"{self.batch_axis!r} of the mesh, got {batch_size} rows"
            )

    def run(
        self, function: Callable, params: PyTree, cache: PyTree, operands: Any, out: Any, operand_specs: Any = WHOLE
    ) -> tuple[Any, Any]:
        """Run `function(params, cache, operands) -> (cache, result)` on every device with its parts.

        `operand_specs` and `out` say how the operands and the result are spread over the devices; by default the
        operands are whole on each.
        """
        param_specs = jax.tree.unflatten(jax.tree.structure(params), self.param_specs)
        given, cache_specs = (params, cache, operands), self.specs_of(cache)
        specs = jax.tree.leaves(jax.tree.broadcast((param_specs, cache_specs, operand_specs), given))
        leaves, treedef = jax.tree.flatten(given)
        has_entries = [jnp.size(leaf) > 0 for leaf in leaves]

        def on_one(*parts: Array) -> tuple[Any, Any]:
            rest = iter(parts)
            own = [
                next(rest) if held else jnp.zeros(NamedSharding(self.mesh, spec).shard_shape(leaf.shape), leaf.dtype)
                for leaf, spec, held in zip(leaves, specs, has_entries, strict=True)
            ]
            return function(*treedef.unflatten(own))

        # Arrays without entries are made inside: where one goes in and out, the compiler of jaxlib 0.11.2 crashes.
        # Devices with the same rows compute the same numbers from exchanges that are exact; JAX cannot see that.
        run = jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=tuple(compress(specs, has_entries)),
            out_specs=(cache_specs, out),
            check_vma=False,
        )
        return run(*compress(leaves, has_entries))


@dataclass(frozen=True)
class InitOnMesh:
    """`Model.init_cache` of a model on a mesh, which makes the part of each device where it stays."""

    init_cache: Callable[[int, int], PyTree]  # of the whole
    sharding: NamedSharding

    def __call__(self, batch_size: int, max_length: int) -> PyTree:
        return jax.jit(self.init_cache, static_argnums=(0, 1), out_shardings=self.sharding)(batch_size, max_length)


@dataclass(frozen=True)
class InitRowsOnMesh:
    """`Model.init_rows` of a model on a mesh, which makes the part of each device where it stays."""

    init_rows: Callable[[int], PyTree]  # of the whole
    mesh: Mesh
    specs: tuple[P, ...]  # of the leaves, in their order

    def __call__(self, batch_size: int) -> PyTree:
        structure = jax.tree.structure(jax.eval_shape(partial(self.init_rows, batch_size)))
        shardings = structure.unflatten([NamedSharding(self.mesh, spec) for spec in self.specs])
        return jax.jit(self.init_rows, static_argnums=0, out_shardings=shardings)(batch_size)


def of_one_device(model: Model) -> Any:
    """Return `model.apply`, or the `apply` of one device's part where devices share the model."""
    return model.apply.apply if isinstance(model.apply, OnMesh) else model.apply


def put(tree: PyTree, sharding: Sharding | PyTree) -> PyTree:
    """Return `jax.device_put(tree, sharding)`, also where other processes have some of the devices.

    Every process must give the same arrays, and puts its devices' parts of them there. With one sharding for all
    arrays, models that are on a mesh already stay as they are.
    """

    def put_one(x: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda x: x if _is_on_mesh(x) else put_one(x, sharding), tree, is_leaf=_is_on_mesh)
    return jax.tree.map(put_one, tree, sharding)


def on_devices(
    model: Model, function: Callable, cache: PyTree, operands: Any, specs: Any = WHOLE, out: Any = WHOLE
) -> tuple[PyTree, Any]:
    """Run `function(model, cache, operands) -> (cache, result)` on every device of a model that `OnMesh` applies.

    The function gets the part of the model and of its cache that is on its device, and so it does of a model on the
    mesh among the operands. `specs` and `out` say how the other operands and the result are spread over the devices; by
    default each has them whole, and the result must be the same on all.
    """
    shared = model.apply
    assert isinstance(shared, OnMesh), "only such a model is on a mesh"

    def run(params: PyTree, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        return function(_own_part(replace(model, params=params)), cache, jax.tree.map(_own_part, operands, **by_model))

    by_model: dict[str, Any] = {"is_leaf": _is_on_mesh}
    specs = jax.tree.map(_specs_of, operands, jax.tree.broadcast(specs, operands), **by_model)
    return shared.run(run, model.params, cache, operands, out, specs)


def _is_on_mesh(x: Any) -> bool:
    """Return whether this is a model that the devices of a mesh share, such as the model of a drafter."""
    return isinstance(x, Model) and isinstance(x.apply, OnMesh)


def _specs_of(x: Any, spec: PyTree) -> PyTree:
    """Return how devices share an operand: a model on a mesh says so itself, and `spec` is of anything else."""
    if not _is_on_mesh(x):
        return spec
    return replace(x, params=jax.tree.unflatten(jax.tree.structure(x.params), x.apply.param_specs))


def _own_part(x: Any) -> Any:
    """Return a model on a mesh as one device has it, whose parameters are its part already, and anything else."""
    if not _is_on_mesh(x):
        return x
    shared = x.apply
    own = {"init_cache": shared.init_cache, "init_rows": shared.init_rows, "axis_name": shared.axis_name}
    return replace(x, apply=shared.apply, **own)


def data_parallel(model: Model, mesh: Mesh, axis_name: str = "batch") -> Model:
    """Return a model for batches whose rows the devices along one axis of a mesh share.

    Each device decodes its rows by itself, with all of the weights, or with its part of them where the model is one of
    `models.tensor_parallel` on the same mesh. Rows draw their noise from keys of their own, so the tokens are the same
    as on one device. Caches are dense: pages would be anybody's.

    Args:
        model: any model.
        mesh: the devices, with axes of the type Auto. A batch must have a multiple of as many rows as the axis has
            devices.
        axis_name: the axis whose devices share the rows.

    Returns:
        The model, with its parameters on the devices of the mesh.

    Raises:
        ValueError: the mesh has no such axis or has axes of another type, or it is not the mesh, or a free axis of it,
            of a model that devices share already.
    """
    check_axis(mesh, axis_name)
    if model.init_rows is not None:
        raise ValueError(
            f"mesh must have no axis {axis_name!r} for a model that keeps recurrent states, which has init_rows, got "
            f"{dict(mesh.shape)}: share its weights along another axis, or give your own model the form without pages"
        )
    shared = model.apply
    if not isinstance(shared, OnMesh):
        specs = tuple(WHOLE for _ in jax.tree.leaves(model.params))
        rows = {"cache_spec": P(axis_name), "batch_axis": axis_name, "has_slots": model.takes_pages}
        shared = OnMesh(model.apply, model.init_cache, mesh, None, specs, vocab_size=model.vocab_size, **rows)
        params = put(model.params, shared.whole)
        init_cache = InitOnMesh(model.init_cache, shared.of_cache)
        return replace(model, params=params, apply=shared, init_cache=init_cache, takes_pages=False, takes_groups=False)
    if shared.mesh != mesh:
        raise ValueError(f"mesh must be that of the model, {shared.mesh}, got {mesh}")
    if axis_name == shared.axis_name or shared.batch_axis is not None:
        taken = [axis for axis in (shared.axis_name, shared.batch_axis) if axis is not None]
        raise ValueError(f"axis_name must be an axis that the model does not take yet, as {taken}, got {axis_name!r}")
    spec = P(axis_name, *shared.cache_spec[1:])
    shared = replace(shared, cache_spec=spec, batch_axis=axis_name, has_slots=model.takes_pages)
    assert isinstance(model.init_cache, InitOnMesh), "a model on a mesh has it"
    init_cache = replace(model.init_cache, sharding=shared.of_cache)
    return replace(model, apply=shared, init_cache=init_cache, takes_pages=False, takes_groups=False)


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError for a mesh of another type."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")


def check_axis(mesh: Mesh, axis_name: str) -> None:
    """Raise ValueError unless the mesh has such an axis, and axes of the type Auto alone."""
    check_mesh(mesh)
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name must be an axis of the mesh, one of {list(mesh.shape)}, got {axis_name!r}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(kind.name for kind in mesh.axis_types)
        raise ValueError(
            f"mesh must have axes of the type Auto, as jax.sharding.Mesh(devices, axis_names) makes them, got {kinds}"
        )
