"""Cut a quantised matrix into the parts that devices have of it, for `specjax.models.sharding`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.models.quantized import Quantized, codes_of, pack
from specjax.parallel import put

Run = tuple[int, int]  # the entries [start, stop) of an axis


def split_quantized(weight: Quantized, axis: int, size: int, runs: Sequence[Sequence[Run]], sharding: NamedSharding):
    """Return a matrix whose arrays hold the part of each device after the part of the one before.

    Args:
        weight: a matrix [..., N, K], or a stack of these, without an order of its inputs where these are cut.
        axis: of the outputs or of the inputs.
        size: of a device's part of the axis; where its runs are shorter, outputs of some number follow.
        runs: what each device has of the axis.
        sharding: of arrays that are cut along the axis.

    Returns:
        The matrix on the devices. Inside `jax.shard_map` each device has a `Quantized` of its part.
    """
    parts = [jax.tree.map(np.asarray, part) for part in _parts(weight, axis, size, runs)]
    fields = {}
    for name in ("values", "scale", "zero", "minimum"):
        arrays = [getattr(part, name) for part in parts]
        fields[name] = None if arrays[0] is None else put(np.concatenate(arrays, axis), sharding)
    if weight.order is not None:
        fields["order"] = put(weight.order, NamedSharding(sharding.mesh, P()))
    return parts[0].replace(**fields)


def specs_of(weight: Quantized, spec: P) -> list[P]:
    """Return the spec of each array of a matrix that `split_quantized` cut so, in the order of `jax.tree.leaves`."""
    names = ("values", "scale", "zero", "minimum", "order")
    fields = {name: P() if name == "order" else spec for name in names if getattr(weight, name) is not None}
    return jax.tree.leaves(weight.replace(**fields), is_leaf=lambda x: isinstance(x, P))


def _parts(weight: Quantized, axis: int, size: int, runs: Sequence[Sequence[Run]]) -> list[Quantized]:
    """Return the part of each device, all of one format."""
    of_rows, of_columns = weight.group
    cuts_outputs = axis == weight.ndim - 2
    group = of_rows if cuts_outputs else of_columns
    bounds = [bound for own in runs for run in own for bound in run]
    if cuts_outputs:
        is_whole = size % of_rows == 0 and all(bound % of_rows == 0 for bound in bounds)
        weight, group = (weight, of_rows) if is_whole else (weight.with_scales_of_rows(), 1)
    elif group:
        group = math.gcd(group, size, *bounds[::2])
        weight = _with_group(weight, group)
    codes = np.asarray(codes_of(weight))
    given = {name: getattr(weight, name) for name in ("scale", "zero", "minimum")}
    arrays = {name: np.asarray(x) for name, x in given.items() if x is not None}

    def part(own: Sequence[Run]) -> Quantized:
        def cut(x: np.ndarray, unit: int, fill: Any) -> np.ndarray:
            pieces = [x[(slice(None),) * axis + (slice(start // unit, -(-stop // unit)),)] for start, stop in own]
            joined = np.concatenate(pieces, axis)
            missing = -(-size // unit) - joined.shape[axis]
            return np.pad(joined, [(0, missing if i == axis else 0) for i in range(joined.ndim)], constant_values=fill)

        # A scale for each output is the same in all parts of its inputs.
        scales = {
            name: x if not cuts_outputs and not group else cut(x, group, 1 if name == "scale" else 0)
            for name, x in arrays.items()
        }
        return pack(
            cut(codes, 1, 0),
            **scales,
            bits=weight.bits,
            code=weight.code,
            group=weight.group,
            order=None if weight.order is None else np.asarray(weight.order),
            dtype=weight.dtype,
        )

    return [part(own) for own in runs]


def _with_group(weight: Quantized, group: int) -> Quantized:
    """Return a matrix with scales for smaller groups of inputs, of which a whole number makes up the old ones."""
    times, number = weight.group[1] // group, -(-weight.shape[-1] // group)
    fields = {
        name: np.repeat(np.asarray(x), times, axis=-1)[..., :number]
        for name in ("scale", "zero", "minimum")
        if (x := getattr(weight, name)) is not None
    }
    return weight.replace(**fields, group=(weight.group[0], group))
