"""Several devices that run one model: the mesh of a model, exchanges between devices, loops inside `jax.shard_map`."""

from specjax.parallel.mesh import (
    WHOLE,
    InitOnMesh,
    InitRowsOnMesh,
    OnMesh,
    check_axis,
    check_mesh,
    data_parallel,
    of_one_device,
    on_devices,
    put,
)

__all__ = [
    "WHOLE",
    "InitOnMesh",
    "InitRowsOnMesh",
    "OnMesh",
    "check_axis",
    "check_mesh",
    "data_parallel",
    "of_one_device",
    "on_devices",
    "put",
]
