"""Scorers: `score(model, context, draft, cache) -> (ModelOutput over K+1 positions, cache)`, one method a file."""

from specjax.scorers.mqa import mqa

__all__ = ["mqa"]
