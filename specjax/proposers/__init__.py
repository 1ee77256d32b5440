"""Proposers, which make drafts: pytree dataclasses with the pure methods of `specjax.types.Proposer`."""

from specjax.proposers.checkpoint import feature_layers, kind_of, load
from specjax.proposers.draft_model import DraftModel, draft_model
from specjax.proposers.eagle import EagleHead, eagle
from specjax.proposers.eagle3 import Eagle3Head, eagle3
from specjax.proposers.fallback import Fallback, fallback
from specjax.proposers.medusa import Medusa, medusa
from specjax.proposers.mlp_speculator import MLPSpeculator, mlp_speculator
from specjax.proposers.ngram import NGram, ngram
from specjax.proposers.none import NoDrafts, none
from specjax.proposers.p_eagle import p_eagle

__all__ = [
    "DraftModel",
    "Eagle3Head",
    "EagleHead",
    "Fallback",
    "MLPSpeculator",
    "Medusa",
    "NGram",
    "NoDrafts",
    "draft_model",
    "eagle",
    "eagle3",
    "fallback",
    "feature_layers",
    "kind_of",
    "load",
    "medusa",
    "mlp_speculator",
    "ngram",
    "none",
    "p_eagle",
]
