"""Trees as arrays: the relations between their nodes, compared with walks in Python."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Categorical, Draft, DraftTree, trees
from specjax.trees import arrays


def above(parents, node):
    """The node and its ancestors."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def random_tree(batch_size, num_nodes):
    rng = np.random.default_rng(0)
    parents = [[-1, *(rng.integers(0, n) for n in range(1, num_nodes))] for _ in range(batch_size)]
    parents = np.array(parents, np.int32)
    depth = np.array([[len(above(row, n)) - 1 for n in range(num_nodes)] for row in parents], np.int32)
    tokens = rng.integers(-1, 3, size=parents.shape).astype(np.int32)
    return DraftTree(tokens, parents, depth, rng.integers(1, num_nodes + 1, size=batch_size).astype(np.int32))


@jax.jit
def relations(tree):
    exists, ancestors = trees.is_node(tree, 3), trees.ancestor_mask(tree.parents)
    return {
        "exists": exists,
        "ancestors": ancestors,
        "depths": trees.depths(tree.parents),
        "first": trees.first_children(tree.parents, exists),
        "next": trees.next_siblings(tree.parents, exists),
        "previous": arrays.previous_siblings(tree.parents, exists),
        "order": arrays.post_order(tree.parents, exists, ancestors),
    }


def test_the_relations_of_random_trees():
    tree = random_tree(200, 9)
    found = jax.device_get(relations(tree))
    np.testing.assert_array_equal(found["depths"], tree.depth)
    for b, parents in enumerate(tree.parents):
        nodes, tokens, count = range(len(parents)), tree.tokens[b], tree.num_nodes[b]
        exists = [
            all(m == 0 or (tokens[m] >= 0 and m < count and tree.depth[b, m] <= 3) for m in above(parents, n))
            for n in nodes
        ]
        children = {n: [m for m in nodes if parents[m] == n and exists[m]] for n in nodes}

        def visited(node):
            return [n for child in children[node] for n in visited(child)] + [node]  # noqa: B023

        assert found["exists"][b].tolist() == exists
        assert found["order"][b].tolist() == visited(0) + [-1] * exists.count(False)
        for n in nodes:
            assert set(np.flatnonzero(found["ancestors"][b, n])) == set(above(parents, n))
            assert found["first"][b, n] == (children[n] or [-1])[0]
            if exists[n] and n:
                siblings = children[parents[n]]
                assert found["next"][b, n] == [*siblings, -1][siblings.index(n) + 1]
                assert found["previous"][b, n] == [-1, *siblings][siblings.index(n)]


def test_a_chain_is_a_tree():
    logits = jnp.arange(12.0).reshape(2, 2, 3)
    tree = trees.of_chain(
        Draft(jnp.array([[0, 1], [2, -1]]), Categorical(logits), jnp.array([2, 1])), jnp.array([1, 2])
    )
    assert tree.tokens.tolist() == [[1, 0, 1], [2, 2, -1]]
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2 and tree.depth.tolist() == [[0, 1, 2]] * 2
    assert tree.num_nodes.tolist() == [3, 2]
    np.testing.assert_array_equal(tree.distribution.logits[tree.distribution.rows[:, :2]], logits)
