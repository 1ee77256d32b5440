"""Measure the embedded pair on held-out modules of the Python standard library: acceptance, and speed at batch 1.

    python scripts/bench_embedded.py

prints the tables of the README. The held-out modules are read from this Python's own library.
"""

import argparse
import statistics
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from train_embedded import HELD_OUT

from specjax import decode, metrics, models, proposers, sampling
from specjax.sampling import SamplingParams
from specjax.types import Model

PROMPT, GENERATED = 64, 256  # tokens
NUM_PROMPTS = 32
REPEATS = 5

prefill = jax.jit(decode.prefill, static_argnames="max_length")


def held_out_prompts(stdlib: Path, tokenizer: Tokenizer) -> np.ndarray:
    """NUM_PROMPTS pieces [N, PROMPT] of held-out modules, evenly spaced."""
    ids = np.concatenate([tokenizer.encode((stdlib / f"{name}.py").read_text()).ids for name in HELD_OUT])
    starts = np.linspace(0, len(ids) - PROMPT, NUM_PROMPTS).astype(int)
    return np.stack([ids[s : s + PROMPT] for s in starts]).astype(np.int32)


def run(target: Model, proposer, prompts: np.ndarray, temperature: float) -> tuple[decode.State, float]:
    """Generate GENERATED tokens after every prompt; the state and the seconds of the loop."""
    rows = sampling.batch([SamplingParams(temperature=temperature, max_tokens=GENERATED)] * len(prompts))
    lengths = jnp.full(len(prompts), PROMPT)
    state = prefill(target, proposer, prompts, lengths, rows, jax.random.key(0), max_length=PROMPT + GENERATED)
    jax.block_until_ready(state)
    start = time.perf_counter()
    state = decode.generate(target, proposer, state)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start


def seconds(target: Model, proposer, prompts: np.ndarray) -> list[float]:
    """Median time of a greedy generation from each prompt alone, compiled before."""
    run(target, proposer, prompts[:1], 0.0)
    return [statistics.median(run(target, proposer, p[None], 0.0)[1] for _ in range(REPEATS)) for p in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=sysconfig.get_paths()["stdlib"])
    parser.add_argument("--pair", type=Path, default=models.EMBEDDED, help="directory of target/ and draft/")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.pair / "tokenizer.json"))
    target, draft = models.load(args.pair / "target"), models.load(args.pair / "draft")
    prompts = held_out_prompts(Path(args.stdlib), tokenizer)
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}, float32, {GENERATED} tokens after prompts of {PROMPT}\n")

    print("| temperature | K | acceptance rate | mean acceptance length |\n|---|---|---|---|")
    for temperature in (0.0, 0.8):
        state, _ = run(target, proposers.draft_model(draft, 4), prompts, temperature)
        rate, length = metrics.acceptance_rate(state.totals), metrics.mean_acceptance_length(state.totals)
        print(f"| {temperature} | 4 | {rate:.3f} | {length:.2f} |", flush=True)

    print("\n| batch 1, temperature 0 | tokens/s | against plain decoding |\n|---|---|---|")
    few = prompts[:: NUM_PROMPTS // 4]
    plain = seconds(target, None, few)
    print(f"| plain | {len(few) * GENERATED / sum(plain):.0f} | 1.00 |", flush=True)
    for num_draft_tokens in (2, 3, 4, 5, 6):
        times = seconds(target, proposers.draft_model(draft, num_draft_tokens), few)
        print(
            f"| K = {num_draft_tokens} | {len(few) * GENERATED / sum(times):.0f} | {sum(plain) / sum(times):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
