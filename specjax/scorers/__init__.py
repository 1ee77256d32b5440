"""Scorers, which run the target over drafts: `score(model, context, draft, cache) -> (ModelOutput, cache)`."""

from specjax.scorers.batch_expansion import batch_expansion
from specjax.scorers.mqa import mqa

__all__ = ["batch_expansion", "mqa"]
