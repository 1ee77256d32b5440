"""Measure the acceptance of drafters on held-out prompts: by verifier, temperature, kind of prompt and position.

    python scripts/evaluate_drafters.py --target smollm2-135m --drafts smollm2-135m-eagle3 smollm2-135m-dflash ngram

`--prompts` is a file of JSON, a list of objects with "kind" and "prompt", as `chat_prompts.py --held-out` writes it.
The prompts get the chat template of the target, which answers all of them at all temperatures in one batch. The script
prints a table for each kind of prompt, and with `--json FILE` writes the counts from which it is made.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from answer_prompts import encode

from specjax import SamplingParams, decode, metrics, models, proposers, sampling, verifiers
from specjax.models import Checkpoint
from specjax.models.hub import find_checkpoint, find_drafter
from specjax.types import Model, Proposer

PROMPTS = Path(__file__).parent / "held_out_prompts.json"
ALL = "all"  # stands for the prompts of all kinds


def with_drafter(target: Model, draft: str, num_draft_tokens: int) -> tuple[Model, Proposer]:
    """Return the target with the features of a drafter, and the drafter, by its directory or name."""
    if draft == "ngram":
        return target, proposers.ngram(num_draft_tokens)
    path = find_drafter(draft)
    target = models.with_feature_layers(target, proposers.feature_layers(path, target))
    return target, proposers.load(path, target, num_draft_tokens=num_draft_tokens)


def run(
    target: Model,
    proposer: Proposer,
    verifier: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    spare: int = 0,
) -> decode.State:
    """Answer prompts and return the state at the end; the buffer has room for `spare` tokens more than they need."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    size = int(lengths.max()) + params[0].max_tokens + spare
    given = tokens, lengths, sampling.batch(params), jax.random.key(0)
    state = _prefill(target, proposer, *given, max_length=size)
    return decode.generate(target, proposer, state, verifier=getattr(verifiers, verifier))


_prefill = jax.jit(decode.prefill, static_argnames="max_length")


def record(totals: metrics.Totals, rows: np.ndarray) -> dict[str, Any]:
    """Return the counts and rates of some rows."""
    some = jax.tree.map(lambda x: x[rows], totals)
    return {
        "tokens": int(some.emitted.sum()),
        "steps": int(some.steps.sum()),
        "drafts": int(some.drafted.sum()),
        "tokens_per_step": round(float(some.emitted.sum() / some.steps.sum()), 3),
        "by_position": [round(float(x), 3) for x in metrics.acceptance_rate_per_position(some)],
    }


def show(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> None:
    """Print a table of tokens a step by kind, and of acceptance by position over all kinds."""
    print(f"\n| drafter | verifier | temperature | {' | '.join(kinds)} | all | by position |")
    print("|---" * (len(kinds) + 5) + "|")
    for key in dict.fromkeys((row["drafter"], row["verifier"], row["temperature"]) for row in rows):
        some = {row["kind"]: row for row in rows if (row["drafter"], row["verifier"], row["temperature"]) == key}
        numbers = " | ".join(f"{some[kind]['tokens_per_step']:.2f}" for kind in [*kinds, ALL])
        places = " ".join(f"{x:.2f}" for x in some[ALL]["by_position"])
        print(f"| {key[0]} | {key[1]} | {key[2]:g} | {numbers} | {places} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="checkpoint or name of the target")
    parser.add_argument("--drafts", nargs="+", required=True, help="directories or names of drafters, or ngram")
    parser.add_argument("--verifiers", nargs="+", default=["rejection", "block", "match"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, help="of each kind, by default all")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()

    checkpoint = Checkpoint(find_checkpoint("target", args.target), keep_codes=False)
    loaded = models.load(checkpoint, dtype=args.dtype)
    seen, questions = Counter(), []
    for question in json.loads(args.prompts.read_text()):
        seen[question["kind"]] += 1
        if args.num_prompts is None or seen[question["kind"]] <= args.num_prompts:
            questions.append(question)
    prompts = encode(checkpoint, [question["prompt"] for question in questions])
    eos = tuple(checkpoint.eos_token_ids(loaded.vocab_size))
    params = [
        SamplingParams(temperature=temperature, max_tokens=args.max_tokens, stop_token_ids=eos)
        for temperature in args.temperatures
        for _ in prompts
    ]
    kinds, rows = list(seen), []
    of_row = np.array([question["kind"] for question in questions] * len(args.temperatures))
    temperature_of_row = np.array([each.temperature for each in params])
    device = jax.devices()[0].device_kind
    print(
        f"{len(prompts)} prompts, K = {args.num_draft_tokens}, {args.dtype}, {device}, jax {jax.__version__}",
        flush=True,
    )
    for draft in args.drafts:
        target, proposer = with_drafter(loaded, draft, args.num_draft_tokens)
        for verifier in args.verifiers:
            began = time.monotonic()
            state = run(target, proposer, verifier, prompts * len(args.temperatures), params)
            totals = jax.device_get(state.totals)
            print(f"{draft}, {verifier}: {time.monotonic() - began:.0f} s", flush=True)
            for temperature in args.temperatures:
                for kind in [*kinds, ALL]:
                    chosen = (temperature_of_row == temperature) & ((of_row == kind) | (kind == ALL))
                    name = Path(draft).name
                    given = {"drafter": name, "verifier": verifier, "temperature": temperature, "kind": kind}
                    rows.append(given | record(totals, np.flatnonzero(chosen)))
    show(rows, kinds)
    if args.json is not None:
        about = {"device": device, "jax": jax.__version__, "dtype": args.dtype, "prompts": len(prompts)}
        about |= {"max_tokens": args.max_tokens, "num_draft_tokens": args.num_draft_tokens}
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.json.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
