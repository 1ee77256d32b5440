"""Measure the device time of verifying and growing trees of drafts on this machine's accelerator.

    python scripts/bench_trees.py
    python scripts/bench_trees.py --batches 1 --num-nodes 16 64 --cases match "traversal, 8 failures"

Each row is printed as soon as it is measured. The trees of verification have random shapes. For traversal the target
calls as many of the nodes that are tested first impossible as the case says, and is sure of the node after them. The
floor is the time to read every row of the target once, and for traversal every row of the draft that nodes were drawn
from; for growing, every row that children are chosen from.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import device_seconds

from specjax import Categorical, DraftTree, trees
from specjax.trees import growing
from specjax.trees.arrays import post_order

PEAK = 2.9e12  # bytes/s that a copy reaches on an H100
NUM_PLACES, WIDTH = 8, 4  # marginals of a block drafter; children of a node
CASES: dict[str, Any] = {  # label: the number of nodes that fail, or the function that grows
    "match": None,
    "traversal, 0 failures": 0,
    "traversal, 8 failures": 8,
    "traversal, all nodes fail": -1,
    "best-first tree of 8 marginals": "best_first",
    "the likeliest 4 of 8 rows": "top",
    "the coupled 4 of 8 rows": "coupled",
    "4 drawn from each of 8 rows": "sampled",
}


def random_tree(batch: int, num_nodes: int) -> DraftTree:
    """Return trees without tokens, each of another shape, in which a node has a few children."""
    rng = np.random.default_rng(0)
    parents = [[-1, *(int(rng.integers(max(0, n - 6), n)) for n in range(1, num_nodes))] for _ in range(batch)]
    parents = jnp.asarray(parents, jnp.int32)
    return DraftTree(jnp.zeros_like(parents), parents, trees.depths(parents))


def inputs(batch: int, num_nodes: int, vocab: int, dtype: str, failures: int | None) -> tuple:
    """Return keys, trees and target of a verification in which `failures` nodes fail; None needs no distribution."""
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 2 * jax.random.normal(keys[0], (batch, num_nodes, vocab))
    target = logits + 0.5 * jax.random.normal(keys[1], logits.shape)
    tree = random_tree(batch, num_nodes)
    step = jax.random.split(keys[2], batch)
    row, parents = jnp.arange(batch)[:, None], jnp.maximum(tree.parents, 0)
    drawn = jax.random.randint(keys[2], (batch, num_nodes), 0, vocab // num_nodes)
    tree = tree._replace(tokens=drawn * num_nodes + jnp.arange(num_nodes))  # siblings differ
    if failures is None:
        return step, tree, Categorical(target.astype(dtype))
    order = post_order(tree.parents, jnp.ones_like(parents, bool), trees.ancestor_mask(tree.parents))
    place = jnp.argsort(order, axis=1)
    failures = num_nodes if failures < 0 else failures
    last = order[:, min(failures, num_nodes - 1)]
    is_above = trees.ancestor_mask(tree.parents)[row[:, 0], last]
    bonus = jnp.where(is_above, 30.0, jnp.where(place < failures, -30.0, 0.0))
    target = target.at[row, parents, tree.tokens].add(bonus.at[:, 0].set(0))
    tree = tree._replace(distribution=Categorical(logits.astype(dtype)))
    return step, tree, Categorical(target.astype(dtype))


def rows_of(batch: int, vocab: int, dtype: str) -> tuple:
    """Return keys, the last tokens and the distributions of 8 rows for growing."""
    logits = (3 * jax.random.normal(jax.random.key(1), (batch, NUM_PLACES, vocab))).astype(dtype)
    keys = jax.random.split(jax.random.key(2), (batch, NUM_PLACES))
    return keys, jnp.zeros(batch, jnp.int32), Categorical(logits)


def verify(name: str, keys: jax.Array, tree: DraftTree, target: Categorical) -> jax.Array:
    return getattr(trees, name)(keys, tree, target).tokens


def grow(kind: str, num_nodes: int, keys: jax.Array, last: jax.Array, rows: Categorical) -> jax.Array:
    if kind == "best_first":
        found = growing.best_first(last, growing.top(rows, num_nodes - 1), num_nodes)
        return found.tokens + found.parents
    if kind == "top":
        return growing.top(rows, WIDTH).tokens
    return getattr(growing, kind)(keys, rows, WIDTH).tokens


def measure(label: str, batch: int, num_nodes: int, vocab: int, dtype: str) -> dict:
    """Time one case."""
    case = CASES[label]
    if isinstance(case, str):
        seconds = device_seconds(partial(grow, case, num_nodes), *rows_of(batch, vocab, dtype))
        read = NUM_PLACES
    else:
        call = partial(verify, "match" if case is None else "traversal")
        make = jax.jit(inputs, static_argnums=(0, 1, 2, 3, 4))
        seconds = device_seconds(call, *make(batch, num_nodes, vocab, dtype, case))
        read = num_nodes if case is None else 2 * num_nodes
    floor = batch * read * vocab * jnp.dtype(dtype).itemsize
    row = {"case": label, "dtype": dtype, "batch": batch, "num_nodes": num_nodes, "vocab": vocab}
    return row | {"us": 1e6 * seconds, "floor_us": 1e6 * floor / PEAK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-nodes", type=int, nargs="+", default=[32])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    device, rows = jax.devices()[0].device_kind, []
    print(f"device {device}, jax {jax.__version__}")
    print("| case | dtype | B | N | V | us | floor, us |\n" + "|---" * 7 + "|")
    for label in args.cases:
        for dtype in args.dtypes:
            for vocab in args.vocabs:
                for num_nodes in args.num_nodes:
                    for batch in args.batches:
                        rows.append(measure(label, batch, num_nodes, vocab, dtype))
                        cells = (f"{x:.1f}" if isinstance(x, float) else str(x) for x in rows[-1].values())
                        print(f"| {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
