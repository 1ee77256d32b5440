"""Measure the acceptance rate of the embedded pair, and its speed at batch size 1, on held-out Python modules.

    python scripts/bench_embedded.py
    python scripts/bench_embedded.py --num-prompts 4 --max-tokens 32 --num-drafts 4 --repeats 1

The first command prints the tables of the README, and the second a quick version of them, each row as soon as it is
measured. The prompts come from those modules of this Python's standard library that the pair was not trained on.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers
from python_corpus import HELD_OUT
from tokenizers import Tokenizer

from specjax import decode, metrics, models, proposers, sampling
from specjax.sampling import SamplingParams
from specjax.types import Model

PROMPT = 64  # tokens per prompt
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


def tokens_per_second(target: Model, proposer, prompts: np.ndarray, max_tokens: int, repeats: int) -> float:
    """Return the speed of greedy generation from each prompt alone, by the median time for each prompt."""

    def seconds(prompt: np.ndarray) -> float:
        return run(target, proposer, prompt[None], 0.0, max_tokens)[1]

    seconds(prompts[0])  # compiles
    medians = [statistics.median(seconds(prompt) for _ in range(repeats)) for prompt in prompts]
    return len(prompts) * max_tokens / sum(medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=sysconfig.get_paths()["stdlib"])
    parser.add_argument(
        "--pair", type=Path, default=models.EMBEDDED, help="directory with tokenizer.json, target/ and draft/"
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

    tokenizer = Tokenizer.from_file(str(args.pair / "tokenizer.json"))
    target, draft = models.load(args.pair / "target"), models.load(args.pair / "draft")
    prompts = held_out_prompts(Path(args.stdlib), tokenizer, args.num_prompts)
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}, float32, {args.max_tokens} tokens after prompts of {PROMPT}.")
    print(f"{peers.NONE}\n\n| temperature | K | acceptance rate | mean acceptance length |\n|---|---|---|---|")
    rows = []
    for temperature in (0.0, 0.8):
        state, _ = run(target, proposers.draft_model(draft, BATCH_K), prompts, temperature, args.max_tokens)
        rate, length = metrics.acceptance_rate(state.totals), metrics.mean_acceptance_length(state.totals)
        row = {"batch": len(prompts), "temperature": temperature, "num_drafts": BATCH_K}
        rows.append(row | {"acceptance_rate": float(rate), "mean_acceptance_length": float(length)})
        print(f"| {temperature} | {BATCH_K} | {rate:.3f} | {length:.2f} |")

    print("\n| batch 1, temperature 0 | tokens/s | against plain decoding |\n|---|---|---|")
    few, speeds = prompts[:: max(1, args.num_prompts // 4)], {}
    for num_drafts in (0, *args.num_drafts):
        proposer = proposers.draft_model(draft, num_drafts) if num_drafts else None
        speed = speeds[num_drafts] = tokens_per_second(target, proposer, few, args.max_tokens, args.repeats)
        rows.append({"batch": 1, "temperature": 0.0, "num_drafts": num_drafts, "tokens_per_s": speed})
        print(f"| {f'K = {num_drafts}' if num_drafts else 'plain'} | {speed:.0f} | {speed / speeds[0]:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
