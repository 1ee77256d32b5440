"""Names the records of specjax for `jax.export`, so that functions which take or return them can be serialised."""

from jax import export

from specjax.decode import Info, State
from specjax.distributions import Law, Residual
from specjax.log_probs import LogProbs
from specjax.metrics import Totals
from specjax.proposers.draft_model import Fed
from specjax.proposers.drawing import Reduced
from specjax.proposers.fallback import Both
from specjax.proposers.feature_draft import HeadState
from specjax.proposers.p_eagle import Pending
from specjax.sampling.arrays import Sampling
from specjax.sampling.guided.tables import Guide
from specjax.types import Categorical, Chunk, Context, Draft, Features, ModelInput, ModelOutput, Verified

RECORDS = (
    *(Categorical, Chunk, Context, Draft, Features, ModelInput, ModelOutput, Verified),
    *(Law, Residual, LogProbs, Totals, Sampling, Guide),
    *(Info, State, Fed, Both, HeadState, Pending, Reduced),
)

for record in RECORDS:
    export.register_namedtuple_serialization(record, serialized_name=f"specjax.{record.__name__}")
