"""Device time of verification on this machine's accelerator.

    python scripts/bench_verify.py
    python scripts/bench_verify.py --batches 8 --num-drafts 7

print the tables of the README. One verification is timed as the slope of a loop on the device: the time of LONG
iterations less that of SHORT ones, so that neither dispatch nor the loop's start counts. A barrier keeps what does not
change from being hoisted out of the loop. Floor: each target row and one draft row a sequence read once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.cut import min_logit
from specjax import Categorical, Draft, verifiers

VOCAB, CUT_ROWS = 128256, 384
CUT_IMPLEMENTATIONS = ("xla", "pallas")
SHORT, LONG, REPEATS = 10, 60, 7
PEAK = 4.3e12  # bytes/s, measured on an H200 by a copy
CASES = {  # verifier, drafts
    "rejection": ("rejection", "sampled"),
    "block": ("block", "sampled"),
    "match, or deterministic drafts": ("match", "deterministic"),
    "typical": ("typical", "deterministic"),
    "synthetic": ("synthetic", "sampled"),
}


def device_seconds(function, keys, *arguments) -> float:
    """Time of one `function(keys, *arguments)` inside a loop on the device."""

    @partial(jax.jit, static_argnames="iterations")
    def loop(iterations, keys, arguments):
        def body(i, carry):
            total, arguments = carry
            arguments = jax.lax.optimization_barrier(arguments)
            step_keys = jax.vmap(jax.random.fold_in)(keys, jnp.full(len(keys), i))
            return total + function(step_keys, *arguments), arguments

        shape = jax.eval_shape(function, keys, *arguments)
        return jax.lax.fori_loop(0, iterations, body, (jnp.zeros(shape.shape, shape.dtype), arguments))[0]

    medians = []
    for iterations in (SHORT, LONG):
        jax.block_until_ready(loop(iterations, keys, arguments))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(loop(iterations, keys, arguments))
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return (medians[1] - medians[0]) / (LONG - SHORT)


def inputs(batch: int, num_drafts: int, dtype, drafts: str) -> tuple[Draft, Categorical]:
    """Logits whose drafts are accepted with probability 0.7 or so."""
    keys = jax.random.split(jax.random.key(0), 3)
    target = 2 * jax.random.normal(keys[0], (batch, num_drafts + 1, VOCAB), dtype)
    logits = target[:, :num_drafts] + 0.5 * jax.random.normal(keys[1], (batch, num_drafts, VOCAB), dtype)
    tokens = jnp.argmax(logits + jax.random.gumbel(keys[2], logits.shape, dtype), axis=-1).astype(jnp.int32)
    return Draft(tokens, Categorical(logits) if drafts == "sampled" else None), Categorical(target)


def time_verifiers(batches: list[int], num_drafts: int) -> list[dict]:
    print("\n| verifier | dtype | " + " | ".join(f"B = {b}" for b in batches), end=" | ")
    print(f"memory floor as % of the time at B = {batches[-1]} |\n" + "|---" * (len(batches) + 3) + "|")
    rows = []
    for label, (name, drafts) in CASES.items():
        options = {"acceptance_length": 0.7 * num_drafts} if name == "synthetic" else {}

        def verify(keys, draft, target, name=name, options=options):
            return getattr(verifiers, name)(keys, draft, target, **options).tokens

        for dtype in (jnp.float32, jnp.bfloat16):
            times = []
            for batch in batches:
                keys = jax.random.split(jax.random.key(1), batch)
                times.append(device_seconds(verify, keys, *inputs(batch, num_drafts, dtype, drafts)))
                read = batch * (num_drafts + 1 + (drafts == "sampled")) * VOCAB * jnp.dtype(dtype).itemsize
                entry = {"verifier": label, "dtype": jnp.dtype(dtype).name, "batch": batch, "num_drafts": num_drafts}
                rows.append(entry | {"us": times[-1] * 1e6, "floor_bytes": read})
            cells = " | ".join(f"{t * 1e6:.0f}" for t in times)
            share = f"{100 * read / PEAK / times[-1]:.0f}" if jax.default_backend() == "gpu" else "-"
            print(f"| {label} | {jnp.dtype(dtype).name} | {cells} | {share} |", flush=True)
    return rows


def time_cut(implementations: Sequence[str] = CUT_IMPLEMENTATIONS) -> list[dict]:
    """The cut of CUT_ROWS rows; `top-p, flat` keeps 30,000 tokens."""
    keys = jax.random.split(jax.random.key(1), 1)
    limits = {
        "top-k 50 + top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "top-p 0.9, flat": {"temperature": 1.0, "top_p": 0.9},
    }
    rows = []
    print(f"\n| [{CUT_ROWS}, {VOCAB}], microseconds | dtype | " + " | ".join(implementations) + " |")
    print("|---" * (len(implementations) + 2) + "|")
    for label, fields in limits.items():
        fields = {name: jnp.full(CUT_ROWS, value) for name, value in fields.items()}
        for dtype in (jnp.float32, jnp.bfloat16):
            logits = 2 * jax.random.normal(jax.random.key(0), (CUT_ROWS, VOCAB), dtype)
            for implementation in implementations:

                def cut(keys, logits, fields, implementation=implementation):
                    return min_logit(logits, **fields, implementation=implementation)

                entry = {"op": label, "dtype": jnp.dtype(dtype).name, "implementation": implementation}
                rows.append(entry | {"us": device_seconds(cut, keys, logits, fields) * 1e6})
            cells = " | ".join(f"{row['us']:.0f}" for row in rows[-len(implementations) :])
            print(f"| {label} | {jnp.dtype(dtype).name} | {cells} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}, V = {VOCAB}, K = {args.num_drafts}; microseconds")
    rows = time_verifiers(args.batches, args.num_drafts)
    rows += time_cut(CUT_IMPLEMENTATIONS if jax.default_backend() == "gpu" else CUT_IMPLEMENTATIONS[:1])
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
