"""Growing trees of drafts from the draft's distributions, in jit and with static numbers of nodes.

| growth | verification that takes it |
|---|---|
| `grow(..., choose=by_top)`, `expand`, `best_first` | `trees.match`, `trees.typical` |
| `grow(..., choose=by_coupling)` | `trees.match` |
| `grow(..., choose=by_drawing)` | `trees.traversal`, `trees.match` |
"""

from specjax.trees.growing.children import Children, coupled, sampled, top
from specjax.trees.growing.dynamic import best_first, expand
from specjax.trees.growing.shapes import (
    EAGLE,
    MEDUSA,
    Shape,
    by_coupling,
    by_drawing,
    by_top,
    grow,
    of_counts,
    of_paths,
    of_widths,
)

__all__ = [
    "EAGLE",
    "MEDUSA",
    "Children",
    "Shape",
    "best_first",
    "by_coupling",
    "by_drawing",
    "by_top",
    "coupled",
    "expand",
    "grow",
    "of_counts",
    "of_paths",
    "of_widths",
    "sampled",
    "top",
]
