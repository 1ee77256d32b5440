"""Cores of trees: rejection from the root, which is right, and cores that are wrong in ways in which others were."""

import jax.numpy as jnp

from specjax import distributions, trees
from specjax.distributions import Residual
from specjax.trees.arrays import ancestor_mask
from specjax.trees.traversal import traversal

WRONG_CORES = {}  # name: the verifier


def wrong(function):
    WRONG_CORES[function.__name__] = trees.from_core(function)
    return function


class Changed:
    """A draw with some calls of another one replaced."""

    def __init__(self, draw, **calls):
        self.flip, self.pick, self.sample, self.loop = draw.flip, draw.pick, draw.sample, draw.loop
        self.__dict__.update(calls)


@trees.from_core
def rejection_from_the_root(draw, tree, target, *, max_depth, log_probs=False):
    """Test siblings in their order, each against the residual of the target without the failed ones."""
    normalized = distributions.normalize(target)
    rows = distributions.probs(normalized)
    drafted = distributions.probs(distributions.normalize(tree.distribution))
    batch, node = jnp.arange(rows.shape[0]), jnp.zeros(rows.shape[0], jnp.int32)
    residual, left = rows[:, 0], drafted[:, 0]
    for child in range(1, tree.tokens.shape[1]):
        token = jnp.maximum(tree.tokens[:, child], 0)
        is_next = trees.exists(tree)[:, child] & (tree.parents[:, child] == node)
        chance = residual[batch, token] / jnp.where(left[batch, token] > 0, left[batch, token], 1)
        coin = draw.flip(jnp.minimum(chance, 1)[:, None], node=jnp.full((rows.shape[0], 1), child))[:, 0] & is_next
        failed = (is_next & ~coin)[:, None]
        rest = jnp.maximum(residual - left, 0)
        rest = rest / jnp.where(rest.sum(-1) > 0, rest.sum(-1), 1)[:, None]
        without = left.at[batch, token].set(0)
        without = without / jnp.where(without.sum(-1) > 0, without.sum(-1), 1)[:, None]
        residual = jnp.where(failed, rest, jnp.where(coin[:, None], rows[:, child], residual))
        left = jnp.where(failed, without, jnp.where(coin[:, None], drafted[:, child], left))
        node = jnp.where(coin, child, node)
    last = distributions.normalize(distributions.Categorical(jnp.log(residual)[:, None]))
    return trees.emit(
        tree,
        node,
        draw.pick(Residual(last)),
        normalized if log_probs else None,
        max_depth=max_depth,
        ancestors=ancestor_mask(tree.parents),
    )


@wrong
def all_probabilities_up_front(draw, tree, target, **options):
    """Enters every sibling with the probability that it would have as the first one."""

    def flip(probabilities, node):
        index = jnp.maximum(node, 0)
        rows = distributions.take_row(distributions.normalize(target), jnp.maximum(tree.parents, 0))
        drafted = distributions.take_row(distributions.normalize(tree.distribution), jnp.maximum(tree.parents, 0))
        log_ratio = [distributions.token_log_prob(each, tree.tokens) for each in (rows, drafted)]
        is_leaf = trees.first_children(tree.parents, trees.exists(tree)) < 0
        joint = jnp.zeros(tree.tokens.shape)
        for _ in range(options["max_depth"]):
            above = jnp.take_along_axis(joint, jnp.maximum(tree.parents, 0), axis=1)
            joint = jnp.where(tree.parents < 0, 0, jnp.minimum(above + log_ratio[0] - log_ratio[1], 0))
        own = jnp.take_along_axis(jnp.where(is_leaf, jnp.exp(joint), -1), index, axis=1)
        return draw.flip(jnp.where(own >= 0, own, probabilities), node=node)

    return traversal.core(Changed(draw, flip=flip), tree, target, **options)


@wrong
def residual_of_one_sibling(draw, tree, target, **options):
    """Draws the next token from the residual that only one failed child leaves."""
    return traversal.core(
        Changed(draw, pick=lambda residual: draw.pick(residual._replace(scale=None))), tree, target, **options
    )


@wrong
def plain_row_at_the_end(draw, tree, target, **options):
    """Draws the next token from the target row, whichever children failed."""
    return traversal.core(
        Changed(draw, pick=lambda residual: draw.pick(Residual(residual.target))), tree, target, **options
    )


@wrong
def a_sample_for_each_path(draw, tree, target, *, max_depth, log_probs=False):
    """Samples a common beginning anew for each path, and keeps the longest path that agrees."""
    samples = [draw.sample(target, depth=tree.depth) for _ in range(2)]
    both = [
        trees.match.core(Changed(draw, sample=lambda *_, s=s, **__: s), tree, target, max_depth=max_depth)
        for s in samples
    ]
    longer = both[1].num_accepted > both[0].num_accepted
    return trees.match.core(
        Changed(draw, sample=lambda *_, **__: jnp.where(longer[:, None], samples[1], samples[0])),
        tree,
        target,
        max_depth=max_depth,
        log_probs=log_probs,
    )
