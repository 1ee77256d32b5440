"""The lossless verifiers in one compiled function, of which a traced index picks: loops are compiled once for all."""

import jax
from jax.tree_util import Partial

from specjax import verifiers

LOSSLESS = [name for name in verifiers.__all__ if name not in verifiers.LOSSY]


def lossless(keys, draft, target, *, index):
    return jax.lax.switch(index, [getattr(verifiers, name) for name in LOSSLESS], keys, draft, target)


def one_of(name):
    """A verifier by its name, for `decode.generate`."""
    return Partial(lossless, index=LOSSLESS.index(name))
