"""Training of drafters: losses, reduced vocabularies, unrolled steps and data, as pure functions, and a loop for them.

Nothing here needs an optimiser but `drafter.train`, which uses optax and is the core of `specjax train`.
"""

from specjax.training import losses
from specjax.training.data import Acceptance, Document, documents, pack, regenerate, replay
from specjax.training.export import save_decoder, save_pretrained
from specjax.training.loop import Progress, Stage, fit
from specjax.training.unroll import (
    Batch,
    Steps,
    anchors,
    block_unroll,
    depth_unroll,
    feature_unroll,
    features,
    medusa_unroll,
)
from specjax.training.vocabulary import Vocabulary, vocabulary

__all__ = [
    "Acceptance",
    "Batch",
    "Document",
    "Progress",
    "Stage",
    "Steps",
    "Vocabulary",
    "anchors",
    "block_unroll",
    "depth_unroll",
    "documents",
    "feature_unroll",
    "features",
    "fit",
    "losses",
    "medusa_unroll",
    "pack",
    "regenerate",
    "replay",
    "save_decoder",
    "save_pretrained",
    "vocabulary",
]
