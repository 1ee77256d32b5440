"""Typical acceptance on trees, which follows the drafts that are likely enough under the target."""

from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.rows import marked
from specjax import distributions
from specjax.trees.arrays import all_above, ancestor_mask, by_parent, deepest, first_children
from specjax.trees.verifier import emit, exists, from_core
from specjax.types import Array, Categorical, DraftTree, Verified
from specjax.verifiers.core import Draw
from specjax.verifiers.typical import check_options, threshold


@partial(from_core, check_options=check_options)
def typical(
    draw: Draw,
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    posterior_threshold: float | Array = 0.09,
    posterior_alpha: float | Array = 0.3,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify a tree by typical acceptance. LOSSY: the output does not follow the target's distribution.

    A node with token x passes if target(x) > min(posterior_threshold, posterior_alpha * exp(-entropy of the target
    row)) in the row of its parent. The longest path of nodes that pass is accepted, the one to the first node where
    several are as long. If that path ends in a leaf, a token is drawn from the target row after it, else the argmax of
    the row is emitted. The tree's distribution is not read.

    Args:
        posterior_threshold: the probability in [0, 1] above which a node always passes.
        posterior_alpha: the factor >= 0 of exp(-entropy), which lowers the threshold where the target is uncertain.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import DraftTree, trees
        >>> tree = DraftTree(jnp.array([[0, 1, 0]]), jnp.array([[-1, 0, 0]]), jnp.array([[0, 1, 1]]))
        >>> logits = jnp.log(jnp.array([[[0.95, 0.05], [0.5, 0.5], [0.0, 1.0]]]))
        >>> trees.typical(jax.random.key(0), tree, logits, max_depth=1).tokens
        Array([[0, 1]], dtype=int32)

    References:
        Cai et al., Medusa: Simple LLM Inference Acceleration Framework, arXiv:2401.10774, section 3.3.1.
    """
    options: dict[str, Any] = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
    check_options(tree.tokens.shape[1] - 1, **options)
    normalized = distributions.normalize(target, argmax=True, axis_name=axis_name)
    ancestors, is_root = ancestor_mask(tree.parents), tree.parents < 0
    of_parent = distributions.take_row(normalized, jnp.maximum(tree.parents, 0))
    bound = by_parent(threshold(distributions.entropy(normalized), posterior_threshold, posterior_alpha), tree.parents)
    passes = jnp.exp(distributions.token_log_prob(of_parent, tree.tokens)) > bound
    node = deepest(tree.depth, exists(tree) & all_above(passes | is_root, ancestors))
    drawn = draw.pick(distributions.Residual(distributions.take_row(normalized, node)))
    assert normalized.argmax is not None, "it was asked for"
    best = marked(normalized.argmax, normalized.log_mass == -jnp.inf)
    is_leaf = first_children(tree.parents, exists(tree)) < 0
    best, is_leaf = (jnp.take_along_axis(x, node[:, None], axis=1)[:, 0] for x in (best, is_leaf))
    token = jnp.where(is_leaf, drawn, best)
    return emit(tree, node, token, normalized if log_probs else None, max_depth=max_depth, ancestors=ancestors)
