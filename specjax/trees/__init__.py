"""Trees of drafts: verifiers `verify(keys, tree, target, **options) -> Verified`, the relations between
nodes, and `growing`.

`match` and `traversal` are lossless, which means that the output follows the target's distribution; `LOSSY` names the
others.
"""

from specjax.trees import growing
from specjax.trees.arrays import ancestor_mask, depths, first_children, is_node, next_siblings, of_chain
from specjax.trees.match import match
from specjax.trees.traversal import traversal
from specjax.trees.typical import typical
from specjax.trees.verifier import canonical as canonical
from specjax.trees.verifier import emit as emit
from specjax.trees.verifier import exists as exists
from specjax.trees.verifier import from_core as from_core

__all__ = [
    "ancestor_mask",
    "depths",
    "first_children",
    "growing",
    "is_node",
    "match",
    "next_siblings",
    "of_chain",
    "traversal",
    "typical",
]
LOSSY = ("typical",)
