"""Time answers to held-out prompts with each drafter, one prompt at a time, against plain decoding.

    python scripts/time_drafters.py --drafts ngram smollm2-135m-eagle3 smollm2-135m-dflash

Each drafter first answers all prompts so that its programs are compiled; the runs that are timed take turns with plain
decoding, so that other processes of the machine disturb all alike.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax

from specjax import LLM, SamplingParams

PROMPTS = Path(__file__).parent / "held_out_prompts.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="checkpoint or name of the target")
    parser.add_argument("--drafts", nargs="+", required=True, help="directories or names of drafters, or ngram")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--num-prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=2, help="timed runs, of which the fastest counts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPUs, bfloat16 elsewhere")
    args = parser.parse_args()

    by_kind: dict[str, list[str]] = {}
    for question in json.loads(PROMPTS.read_text()):
        by_kind.setdefault(question["kind"], []).append(question["prompt"])
    questions = [prompt for prompts in by_kind.values() for prompt in prompts[: args.num_prompts]]
    options = {"num_draft_tokens": args.num_draft_tokens, "dtype": args.dtype}
    llms = {draft: LLM(args.target, draft, **options) for draft in args.drafts}
    llms = {"plain": next(iter(llms.values())).plain()} | llms
    prompts = [llms["plain"].encode_chat([{"role": "user", "content": question}]) for question in questions]
    where = f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} processors"
    print(f"{len(prompts)} prompts, K = {args.num_draft_tokens}, {where}, jax {jax.__version__}", flush=True)
    print("\n| drafter | temperature | tokens/s | of plain |\n|---|---|---|---|", flush=True)
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=0)
        best: dict[str, float] = {}
        for turn in range(-1, args.turns):  # turn -1 compiles
            for name, llm in llms.items():
                began = time.perf_counter()
                count = sum(len(llm.generate([prompt], params)[0].token_ids) for prompt in prompts)
                speed = count / (time.perf_counter() - began)
                best[name] = speed if turn <= 0 else max(best[name], speed)
        for name, speed in best.items():
            print(f"| {Path(name).name} | {temperature:g} | {speed:.1f} | {speed / best['plain']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
