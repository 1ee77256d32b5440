"""Scorers: `score(model, context, draft, cache) -> (ModelOutput over K+1 positions, cache)`, one method a file."""

from specjax.scorers.batch_expansion import batch_expansion
from specjax.scorers.mqa import mqa

__all__ = ["batch_expansion", "mqa"]
