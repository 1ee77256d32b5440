"""Names the records of specjax for `jax.export`, so that functions which take or return them can be serialised."""

import json
from typing import Any

import jax.numpy as jnp
from jax import export

from pallas_kernels.quantized import Quantized
from specjax.decode import Info, State
from specjax.decoding.log_probs import LogProbs
from specjax.distributions import Normalized, Residual
from specjax.metrics import Totals
from specjax.models.linear import CentredNorm, Norm
from specjax.pages import Pages
from specjax.prompts import Fed
from specjax.proposers.drawing import Reduced
from specjax.proposers.p_eagle import Pending
from specjax.proposers.within_budget import Counts
from specjax.sampling.arrays import Sampling
from specjax.sampling.guided.tables import Guide
from specjax.trees.growing.children import Children
from specjax.types import (
    Categorical,
    Chunk,
    Context,
    Draft,
    DraftTree,
    Features,
    Memory,
    ModelInput,
    ModelOutput,
    Verified,
)

RECORDS = (
    *(Categorical, Chunk, Context, Draft, DraftTree, Features, ModelInput, ModelOutput, Verified),
    *(Normalized, Residual, LogProbs, Totals, Sampling, Guide),
    *(Info, State, Fed, Pending, Reduced, Counts, Children, Norm, CentredNorm),
)

for record in RECORDS:
    export.register_namedtuple_serialization(record, serialized_name=f"specjax.{record.__name__}")
export.register_pytree_node_serialization(
    Memory, serialized_name="specjax.Memory", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
)


def _pages(data: bytes) -> tuple[int, ...]:
    """Return the static fields of `Pages`."""
    return tuple(json.loads(data))


def _of_quantized(static: tuple[Any, ...]) -> bytes:
    """Return the static fields of `Quantized` as JSON."""
    *numbers, dtype = static
    return json.dumps([*numbers, jnp.dtype(dtype).name]).encode()


def _quantized(data: bytes) -> tuple[Any, ...]:
    """Return the static fields of `Quantized`."""
    bits, code, group, padding, dtype = json.loads(data)
    return bits, code, tuple(group), padding, jnp.dtype(dtype)


export.register_pytree_node_serialization(
    Pages,
    serialized_name="specjax.Pages",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=_pages,
)
export.register_pytree_node_serialization(
    Quantized,
    serialized_name="specjax.Quantized",
    serialize_auxdata=_of_quantized,
    deserialize_auxdata=_quantized,
)
