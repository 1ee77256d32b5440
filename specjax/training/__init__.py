"""Training of drafters: losses, reduced vocabularies, unrolled steps and data, as pure functions for any loop.

Nothing here needs an optimiser; `scripts/train_draft.py` is a loop that uses these functions with optax and orbax.
"""

from specjax.training import losses
from specjax.training.data import Acceptance, Document, documents, pack, regenerate, replay
from specjax.training.export import save_pretrained
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
    "Steps",
    "Vocabulary",
    "anchors",
    "block_unroll",
    "depth_unroll",
    "documents",
    "feature_unroll",
    "features",
    "losses",
    "medusa_unroll",
    "pack",
    "regenerate",
    "replay",
    "save_pretrained",
    "vocabulary",
]
