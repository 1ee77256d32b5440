"""The state of slots that are all vacant, on the devices of a model."""

from functools import partial

import jax
from jax.sharding import NamedSharding, Sharding

from specjax import decode
from specjax.decoding import state_rows
from specjax.engine.slot_rows import empty
from specjax.parallel import WHOLE, OnMesh
from specjax.parallel.turns import turn_on
from specjax.sampling.capacities import Capacities
from specjax.types import Model, Proposer, PyTree


def empty_on_devices(
    model: Model,
    proposer: Proposer,
    *,
    num_slots: int,
    max_length: int,
    capacities: Capacities,
    pool: tuple[int, int] | None,
) -> tuple[decode.State, Sharding]:
    """Return the result of `empty`, and the sharding for arrays of the host.

    Each array is where the calls leave it, and committed to be there, so that they are compiled once.
    """
    make = partial(empty, num_slots=num_slots, max_length=max_length, capacities=capacities, pool=pool)
    if not isinstance(model.apply, OnMesh):
        state = _empty(model, proposer, num_slots=num_slots, max_length=max_length, capacities=capacities, pool=pool)
        sharding = _sharding_of_committed(model.params, proposer) or state.context.tokens.sharding
        return jax.device_put(state, sharding), sharding
    shared = model.apply
    shapes = jax.eval_shape(make, model, proposer)
    specs = state_rows.specs(shapes, shared.of_rows)
    specs = specs._replace(cache=jax.tree.broadcast(shared.specs_of(shapes.cache), shapes.cache))
    shardings = jax.tree.map(partial(NamedSharding, shared.mesh), specs)
    with turn_on(shared.mesh.devices.flat):
        return jax.jit(make, out_shardings=shardings)(model, proposer), shared.whole


def _sharding_of_committed(*trees: PyTree) -> Sharding | None:
    """Return the sharding that replicates an array on the devices of committed arrays; None without these."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and leaf.committed:
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
                return NamedSharding(sharding.mesh, WHOLE)
            return sharding
    return None


_empty = jax.jit(empty, static_argnames=("num_slots", "max_length", "capacities", "pool"))
