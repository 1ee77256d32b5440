"""Measure the acceptance rates of the embedded drafters, and their speed at batch size 1, on held-out Python modules.

    python scripts/bench_embedded.py
    python scripts/bench_embedded.py --num-prompts 4 --max-tokens 32 --num-drafts 4 --repeats 1

The first command prints the tables of the docs, and the second a quick version of them, each row as soon as it is
measured. The prompts come from those modules of this Python's standard library that the models were not trained on.
The default drafter, the EAGLE-3 head, is timed with each number of drafts, all others with BATCH_K, each in turns with
plain decoding.
"""

import argparse
import json
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers
from python_corpus import HELD_OUT
from tokenizers import Tokenizer

from specjax import decode, metrics, models, proposers, sampling
from specjax.sampling import SamplingParams
from specjax.types import Model, Proposer

PROMPT = 64  # tokens per prompt
TEMPERATURES = 0.0, 0.8
DEFAULT = "eagle3"  # the drafter of `LLM()`
BATCH_K = 4  # number of drafts for the acceptance rate, which is measured on one batch of all prompts

prefill = jax.jit(decode.prefill, static_argnames="max_length")


def held_out_prompts(stdlib: Path, tokenizer: Tokenizer, num_prompts: int) -> np.ndarray:
    """Return evenly spaced pieces [num_prompts, PROMPT] int32 of the held-out modules."""
    ids = np.concatenate([tokenizer.encode((stdlib / f"{name}.py").read_text()).ids for name in HELD_OUT])
    starts = np.linspace(0, len(ids) - PROMPT, num_prompts).astype(int)
    return np.stack([ids[s : s + PROMPT] for s in starts]).astype(np.int32)


def run(
    target: Model, proposer, prompts: np.ndarray, temperature: float, max_tokens: int
) -> tuple[decode.State, float]:
    """Generate `max_tokens` after every prompt; return the final state and the seconds of the loop."""
    rows = sampling.batch([SamplingParams(temperature=temperature, max_tokens=max_tokens)] * len(prompts))
    lengths = jnp.full(len(prompts), PROMPT)
    state = prefill(target, proposer, prompts, lengths, rows, jax.random.key(0), max_length=PROMPT + max_tokens)
    jax.block_until_ready(state)
    start = time.perf_counter()
    state = decode.generate(target, proposer, state)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start


def tokens_per_second(
    target: Model,
    model: Model,
    proposer: Proposer,
    prompts: np.ndarray,
    temperature: float,
    max_tokens: int,
    repeats: int,
) -> tuple[float, float]:
    """Return the speed of generation from each prompt alone with drafts and without, by median times for each prompt.

    The two take turns, so that a machine that slows down slows both.
    """
    both = (model, proposer), (target, None)
    for each in both:
        run(*each, prompts[:1], temperature, max_tokens)  # compiles
    sums = np.zeros(2)
    for prompt in prompts:
        times = [[run(*each, prompt[None], temperature, max_tokens)[1] for each in both] for _ in range(repeats)]
        sums += np.median(times, axis=0)
    drafting, plain = len(prompts) * max_tokens / sums
    return float(drafting), float(plain)


def drafters(family: Path, target: Model, num_drafts: int) -> dict[str, tuple[Model, Proposer]]:
    """Return the drafters of a family by their names, each with the target that gives its features."""
    draft = proposers.draft_model(models.load(family / "draft"), num_drafts)
    found: dict[str, tuple[Model, Proposer]] = {"draft": (target, draft)}
    for directory in sorted(path.parent for path in family.glob("*/config.json")):
        if directory.name not in ("target", "draft") and proposers.kind_of(directory) is not None:
            model = models.with_feature_layers(target, proposers.feature_layers(directory, target))
            found[directory.name] = model, proposers.load(directory, model, num_draft_tokens=num_drafts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=sysconfig.get_paths()["stdlib"])
    parser.add_argument(
        "--family", type=Path, default=models.EMBEDDED, help="directory with tokenizer.json, target/ and drafters"
    )
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens to generate after each prompt")
    parser.add_argument(
        "--num-drafts", type=int, nargs="+", default=[2, 3, 4, 5, 6], help="numbers of drafts to time at batch size 1"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs per prompt; their median counts")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    tokenizer = Tokenizer.from_file(str(args.family / "tokenizer.json"))
    target = models.load(args.family / "target")
    family = drafters(args.family, target, BATCH_K)
    prompts = held_out_prompts(Path(args.stdlib), tokenizer, args.num_prompts)
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}, float32, {args.max_tokens} tokens after prompts of {PROMPT}.")
    print(f"{peers.NONE}\n\n| drafter | temperature | K | accepted by position | mean acceptance length |")
    print("|---|---|---|---|---|")
    rows = []
    for name, (model, proposer) in family.items():
        for temperature in TEMPERATURES:
            state, _ = run(model, proposer, prompts, temperature, args.max_tokens)
            length = metrics.mean_acceptance_length(state.totals)
            by_position = metrics.acceptance_rate_per_position(state.totals).tolist()
            row = {"drafter": name, "batch": len(prompts), "temperature": temperature, "num_drafts": BATCH_K}
            rows.append(row | {"by_position": by_position, "mean_acceptance_length": float(length)})
            rates = " ".join(f"{rate:.2f}" for rate in by_position)
            print(f"| {name} | {temperature} | {BATCH_K} | {rates} | {length:.2f} |")

    print("\n| batch 1 | temperature | K | tokens/s | plain decoding, tokens/s | ratio |\n|---|---|---|---|---|---|")
    few = prompts[:: max(1, args.num_prompts // 4)]
    for temperature in TEMPERATURES:
        for name, (model, proposer) in family.items():
            for num_drafts in args.num_drafts if name == DEFAULT else [BATCH_K]:
                proposer = replace(proposer, num_draft_tokens=num_drafts)
                speeds = tokens_per_second(target, model, proposer, few, temperature, args.max_tokens, args.repeats)
                speed, plain = speeds
                row = {"drafter": name, "batch": 1, "temperature": temperature, "num_drafts": num_drafts}
                rows.append(row | {"tokens_per_s": speed, "plain_tokens_per_s": plain})
                print(f"| {name} | {temperature} | {num_drafts} | {speed:.0f} | {plain:.0f} | {speed / plain:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
