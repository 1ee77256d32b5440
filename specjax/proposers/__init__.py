"""Proposers, which make drafts: pytree dataclasses with the pure methods of `specjax.types.Proposer`."""

from specjax.proposers.draft_model import DraftModel, draft_model
from specjax.proposers.fallback import Fallback, fallback
from specjax.proposers.medusa import Medusa, medusa
from specjax.proposers.mlp_speculator import MLPSpeculator, mlp_speculator
from specjax.proposers.ngram import NGram, ngram
from specjax.proposers.none import NoDrafts, none

__all__ = [
    "DraftModel",
    "Fallback",
    "MLPSpeculator",
    "Medusa",
    "NGram",
    "NoDrafts",
    "draft_model",
    "fallback",
    "medusa",
    "mlp_speculator",
    "ngram",
    "none",
]
