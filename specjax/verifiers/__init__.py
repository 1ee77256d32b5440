"""Verifiers, which accept or reject drafts: `verify(keys, draft, target, **options) -> Verified`.

They are lossless, which means that the output follows the target's distribution, except those named in `LOSSY`.
"""

from specjax.verifiers.block import block
from specjax.verifiers.core import canonical as canonical
from specjax.verifiers.core import from_core as from_core
from specjax.verifiers.match import match
from specjax.verifiers.rejection import rejection
from specjax.verifiers.synthetic import synthetic
from specjax.verifiers.typical import typical

__all__ = ["block", "match", "rejection", "synthetic", "typical"]
LOSSY = ("synthetic", "typical")
