"""Device time of verification on this machine's accelerator.

    python scripts/bench_verify.py [--json FILE]

prints the table of the README. One verification is timed as the slope of a loop on the device: the time of LONG
iterations less that of SHORT ones, so that neither dispatch nor the loop's start counts. A barrier keeps what does not
change from being hoisted out of the loop. Floor: each target row and one draft row a sequence read once.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax import Categorical, Draft, verifiers

VOCAB, NUM_DRAFTS = 128256, 5
BATCHES = (1, 8, 64, 256)
SHORT, LONG, REPEATS = 10, 60, 7
PEAK = 4.3e12  # bytes/s, measured on an H200 by a copy
CASES = {  # verifier, drafts
    "rejection": ("rejection", "sampled"),
    "block": ("block", "sampled"),
    "match, or deterministic drafts": ("match", "deterministic"),
    "typical": ("typical", "deterministic"),
    "synthetic": ("synthetic", "sampled"),
}


@partial(jax.jit, static_argnames=("name", "iterations"))
def loop(name, iterations, keys, draft, target):
    options = {"acceptance_length": 3.5} if name == "synthetic" else {}

    def body(i, carry):
        total, draft, target = carry
        draft, target = jax.lax.optimization_barrier((draft, target))
        step_keys = jax.vmap(jax.random.fold_in)(keys, jnp.full(len(keys), i))
        return total + getattr(verifiers, name)(step_keys, draft, target, **options).tokens, draft, target

    total = jnp.zeros((len(keys), NUM_DRAFTS + 1), jnp.int32)
    return jax.lax.fori_loop(0, iterations, body, (total, draft, target))[0]


def seconds(*arguments) -> float:
    jax.block_until_ready(loop(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(loop(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def inputs(batch: int, dtype, drafts: str):
    """Logits whose drafts are accepted with probability 0.7 or so."""
    keys = jax.random.split(jax.random.key(0), 3)
    target = 2 * jax.random.normal(keys[0], (batch, NUM_DRAFTS + 1, VOCAB), dtype)
    logits = target[:, :NUM_DRAFTS] + 0.5 * jax.random.normal(keys[1], (batch, NUM_DRAFTS, VOCAB), dtype)
    tokens = jnp.argmax(logits + jax.random.gumbel(keys[2], logits.shape, dtype), axis=-1).astype(jnp.int32)
    return Draft(tokens, Categorical(logits) if drafts == "sampled" else None), Categorical(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, V = {VOCAB}, K = {NUM_DRAFTS}; microseconds")
    print(
        "\n| verifier | dtype | "
        + " | ".join(f"B = {b}" for b in BATCHES)
        + " | memory floor as % of the time at B = 256 |"
    )
    print("|---" * (len(BATCHES) + 3) + "|")
    rows = []
    for label, (name, drafts) in CASES.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            times = []
            for batch in BATCHES:
                keys = jax.random.split(jax.random.key(1), batch)
                arguments = inputs(batch, dtype, drafts)
                slope = (seconds(name, LONG, keys, *arguments) - seconds(name, SHORT, keys, *arguments)) / (
                    LONG - SHORT
                )
                read = batch * (NUM_DRAFTS + 1 + (drafts == "sampled")) * VOCAB * jnp.dtype(dtype).itemsize
                times.append(slope)
                rows.append(
                    {
                        "verifier": label,
                        "dtype": jnp.dtype(dtype).name,
                        "batch": batch,
                        "us": slope * 1e6,
                        "bytes": read,
                    }
                )
            cells = " | ".join(f"{t * 1e6:.0f}" for t in times)
            print(f"| {label} | {jnp.dtype(dtype).name} | {cells} | {100 * read / PEAK / times[-1]:.0f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
