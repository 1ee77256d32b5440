"""Proposers, which make drafts: pytree dataclasses with the pure methods of `specjax.types.Proposer`."""

from specjax.proposers.draft_model import DraftModel, draft_model
from specjax.proposers.fallback import Fallback, fallback
from specjax.proposers.ngram import NGram, ngram
from specjax.proposers.none import NoDrafts, none

__all__ = ["DraftModel", "Fallback", "NGram", "NoDrafts", "draft_model", "fallback", "ngram", "none"]
