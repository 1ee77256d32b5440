"""Exact match on trees, which samples the target after every node and follows the children that agree."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.rows import Batch
from pallas_kernels.sample import sample
from specjax import distributions
from specjax.keys import TARGET, at_depth, stream
from specjax.operations.dispatch import as_rows
from specjax.trees.arrays import all_above, ancestor_mask, by_parent, deepest, siblings_after
from specjax.trees.verifier import emit, exists, from_core
from specjax.types import Array, Categorical, DraftTree, Verified
from specjax.verifiers.core import Draw


def _kernel(
    keys: Array,
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    interpret: bool,
    log_probs: bool = False,
) -> Verified:
    batch = Batch(None, None, None, as_rows(target._replace(log_normalizer=None)), None)
    data = jax.random.key_data(stream(at_depth(keys, tree.depth), TARGET))
    sampled = sample(data, batch, interpret=interpret).tokens
    return follow(tree, target, sampled, max_depth=max_depth, log_probs=log_probs)


@partial(from_core, kernel=_kernel)
def match(
    draw: Draw,
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify a tree by exact match with samples of the target. Lossless: the output follows the target's distribution.

    The sample after a node of depth d is argmax(logits / temperature + Gumbel noise of position d). From node 0 on the
    path goes to the child whose token equals the sample, as long as there is one, and the sample after the last node is
    emitted after the path.

    With keys by absolute position the output equals the output of plain sampling with the same keys, whatever the tree
    is. The tree may be grown, ranked and cut in any way, even by the target's own noise, and its distribution is not
    read. The first of equal siblings is followed. No further node makes the path shorter, unless it equals a sibling.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import DraftTree, trees
        >>> tree = DraftTree(jnp.array([[0, 1, 0, 1]]), jnp.array([[-1, 0, 0, 2]]), jnp.array([[0, 1, 1, 2]]))
        >>> logits = jnp.log(jnp.array([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]]))
        >>> verified = trees.match(jax.random.key(0), tree, logits, max_depth=2)
        >>> verified.tokens, verified.path
        (Array([[0, 1, 0]], dtype=int32), Array([[0, 2, 3]], dtype=int32))

    References:
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv:2408.07978.
    """
    sampled = draw.sample(target, depth=tree.depth)
    return follow(tree, target, sampled, max_depth=max_depth, log_probs=log_probs, axis_name=axis_name)


def follow(
    tree: DraftTree,
    target: Categorical,
    sampled: Array,
    *,
    max_depth: int,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify by the samples [B, N] int32 after the nodes, which may be `marked`.

    The first of equal siblings is followed, so the output rests on one sample of each depth.
    """
    ancestors, there = ancestor_mask(tree.parents), exists(tree)
    is_same = tree.tokens[:, :, None] == tree.tokens[:, None]
    is_repeated = jnp.any(siblings_after(tree.parents, there) & is_same & there[..., None], axis=1)
    agrees = (tree.tokens == by_parent(sampled, tree.parents)) & ~is_repeated
    node = deepest(tree.depth, there & all_above(agrees | (tree.parents < 0), ancestors))
    token = jnp.take_along_axis(sampled, node[:, None], axis=1)[:, 0]
    normalized = distributions.normalize(target, axis_name=axis_name) if log_probs else None
    return emit(tree, node, token, normalized, max_depth=max_depth, ancestors=ancestors)
