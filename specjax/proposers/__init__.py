"""Proposers, which make drafts: pytree dataclasses with the pure methods of `specjax.types.Proposer`."""

from specjax.proposers.assistant import Assistant
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.checkpoint import feature_layers, kind_of, load
from specjax.proposers.dflash import dflash
from specjax.proposers.dflash2 import dflash2
from specjax.proposers.draft_model import DraftModel, draft_model
from specjax.proposers.dspark import dspark
from specjax.proposers.eagle import EagleHead, eagle
from specjax.proposers.eagle3 import Eagle3Head, eagle3
from specjax.proposers.fallback import Fallback, fallback
from specjax.proposers.medusa import Medusa, medusa
from specjax.proposers.mlp_speculator import MLPSpeculator, mlp_speculator
from specjax.proposers.mtp import MTPHead, mtp
from specjax.proposers.ngram import NGram, ngram
from specjax.proposers.none import NoDrafts, none
from specjax.proposers.p_eagle import p_eagle
from specjax.proposers.self_draft import SelfDraft, self_draft
from specjax.proposers.within_budget import WithinBudget, within_budget

__all__ = [
    "Assistant",
    "BlockHead",
    "DraftModel",
    "Eagle3Head",
    "EagleHead",
    "Fallback",
    "MLPSpeculator",
    "MTPHead",
    "Medusa",
    "NGram",
    "NoDrafts",
    "SelfDraft",
    "WithinBudget",
    "dflash",
    "dflash2",
    "draft_model",
    "dspark",
    "eagle",
    "eagle3",
    "fallback",
    "feature_layers",
    "kind_of",
    "load",
    "medusa",
    "mlp_speculator",
    "mtp",
    "ngram",
    "none",
    "p_eagle",
    "self_draft",
    "within_budget",
]
