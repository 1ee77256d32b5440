"""Names the records of specjax for `jax.export`, so that functions which take or return them can be serialised."""

from jax import export

from specjax.decode import Info, State
from specjax.decoding.log_probs import LogProbs
from specjax.distributions import Normalized, Residual
from specjax.metrics import Totals
from specjax.models.linear import Norm
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
    *(Info, State, Fed, Pending, Reduced, Counts, Children, Norm),
)

for record in RECORDS:
    export.register_namedtuple_serialization(record, serialized_name=f"specjax.{record.__name__}")
export.register_pytree_node_serialization(
    Memory, serialized_name="specjax.Memory", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
)
