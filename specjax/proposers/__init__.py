"""Proposers: pytree dataclasses with pure methods `init`, `prefill`, `propose`, `update`, one method a file."""

from specjax.proposers.draft_model import DraftModel, draft_model
from specjax.proposers.ngram import NGram, ngram
from specjax.proposers.none import NoDrafts, none

__all__ = ["DraftModel", "NGram", "NoDrafts", "draft_model", "ngram", "none"]
