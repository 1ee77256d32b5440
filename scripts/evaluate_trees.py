"""Measure the tokens of a step with drafts in chains and in trees, by drafter, temperature, depth and number of nodes.

    python scripts/evaluate_trees.py
    python scripts/evaluate_trees.py --drafters eagle3 --depths 4 6 --nodes 16 32

The embedded target continues beginnings of functions and classes of the held-out modules. At temperature 0 chains and
trees are verified by match. At other temperatures chains are sampled and verified by block, or coupled and verified by
match; and trees are sampled and verified by traversal, or coupled and verified by match.
"""

import argparse
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np
from evaluate_drafters import run
from evaluate_embedded import beginnings
from tokenizers import Tokenizer

from specjax import SamplingParams, models, proposers
from specjax.types import Model, Proposer


def drafter(target: Model, name: str, depth: int, nodes: int | None, coupled: bool) -> tuple[Model, Proposer]:
    """Return the target with the features of a drafter, and the drafter in a chain, or in a tree of `nodes` nodes."""
    if name == "ngram":
        own = proposers.ngram(depth)
    elif name == "draft":
        own = proposers.draft_model(models.load(models.EMBEDDED / name), depth)
    else:
        path = models.EMBEDDED / name
        target = models.with_feature_layers(target, proposers.feature_layers(path, target))
        own = proposers.load(path, target, num_draft_tokens=depth)
    if nodes is None and coupled and name != "ngram":
        nodes = depth + 1  # a chain
    return target, own if nodes is None else own.with_tree(nodes, coupled=coupled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["eagle3", "draft", "dflash", "ngram"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    tokenizer = Tokenizer.from_file(str(models.EMBEDDED / "tokenizer.json"))
    prompts = beginnings(args.stdlib, tokenizer, args.num_prompts)
    target, rows = models.load(models.EMBEDDED / "target"), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, float32, {len(prompts)} prompts")
    print("| drafter | temperature | verifier | depth | nodes | tokens a step |\n|---|---|---|---|---|---|")
    for name in args.drafters:
        for temperature in args.temperatures:
            params = [
                SamplingParams(temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=i)
                for i in range(len(prompts))
            ]
            ways = [("match", True)] if temperature == 0 or name == "ngram" else [("block", False), ("match", True)]
            for verifier, coupled in ways:
                for depth in args.depths:
                    for nodes in (None, *args.nodes):
                        if nodes is not None and nodes <= depth + 1:
                            continue
                        try:
                            model, own = drafter(target, name, depth, nodes, coupled)
                        except ValueError as error:
                            print(f"| {name} | {temperature:g} | {verifier} | {depth} | {nodes} | {error} |")
                            continue
                        totals = run(model, own, verifier, prompts, params, spare=max(args.nodes)).totals
                        figure = float(np.sum(totals.emitted) / np.sum(totals.steps))
                        row: dict[str, Any] = {"drafter": name, "temperature": temperature, "verifier": verifier}
                        row |= {
                            "depth": depth,
                            "nodes": nodes or depth + 1,
                            "tree": nodes is not None,
                            "tokens_per_step": round(figure, 3),
                        }
                        rows.append(row)
                        shape = "chain" if nodes is None else nodes
                        print(f"| {name} | {temperature:g} | {verifier} | {depth} | {shape} | {figure:.3f} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
