"""Device time of verification on this machine's accelerator, by XLA and by the Pallas kernels.

    python scripts/bench_verify.py
    python scripts/bench_verify.py --vocabs 32000 128256 151936 --num-drafts 1 3 5 8
    python scripts/bench_verify.py --batches 8 --num-drafts 7 --dtypes float32

print the tables of the README. Floor: each target row and, under sampled drafts, one draft row a sequence read once;
the proposer reports the log-normaliser of what it drew from.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import device_seconds

from pallas_kernels.cut import min_logit
from specjax import Categorical, Draft, verifiers

CUT_ROWS = 384
LIMITS = {
    "cut, top-k 50 and top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "cut, top-p 0.9 of a flat law": {"top_p": 0.9},  # a quarter of the vocabulary
}
PEAK = 4.3e12  # bytes/s, measured on an H200 by a copy
CASES = {  # label: verifier, drafts, temperature
    "rejection": ("rejection", "sampled", None),
    "rejection, temperature 0.8": ("rejection", "sampled", 0.8),
    "block": ("block", "sampled", None),
    "match, or deterministic drafts": ("match", "deterministic", None),
    "the same, all of them accepted": ("match", "accepted", None),
    "typical": ("typical", "deterministic", None),
    "synthetic": ("synthetic", "sampled", None),
}


def _normal(key: jax.Array, *shape: int, dtype, scale: float) -> jax.Array:
    """Normal numbers drawn in float32: those drawn in bfloat16 have hundreds of equal maxima."""
    return (scale * jax.random.normal(key, shape)).astype(dtype)


def inputs(batch: int, num_drafts: int, vocab: int, dtype, drafts: str, temperature) -> tuple[Draft, Categorical]:
    """Logits whose sampled drafts are accepted with probability 0.7 or so; deterministic ones hardly ever, or all."""
    keys = jax.random.split(jax.random.key(0), 3)
    temperature = None if temperature is None else jnp.full(batch, temperature)
    scale = 1 if temperature is None else 1 / temperature[:, None, None]
    target = _normal(keys[0], batch, num_drafts + 1, vocab, dtype=dtype, scale=2)
    logits = target[:, :num_drafts] + _normal(keys[1], batch, num_drafts, vocab, dtype=dtype, scale=0.5)
    scaled = logits.astype(jnp.float32) * scale
    tokens = jnp.argmax(scaled + jax.random.gumbel(keys[2], logits.shape), axis=-1).astype(jnp.int32)
    known = jax.scipy.special.logsumexp(scaled, axis=-1)
    if drafts == "accepted":
        sequence, position = jnp.arange(batch)[:, None], jnp.arange(num_drafts)[None]
        target = target.at[sequence, position, tokens].set(100)
    distribution = Categorical(logits, temperature, None, known) if drafts == "sampled" else None
    return Draft(tokens, distribution), Categorical(target, temperature)


def time_verifiers(args: argparse.Namespace, num_drafts: int, vocab: int) -> list[dict]:
    print(f"\nV = {vocab}, K = {num_drafts}\n\n| verifier | dtype | implementation | ", end="")
    print(" | ".join(f"B = {b}" for b in args.batches), f"| % of peak bandwidth at B = {args.batches[-1]} |")
    print("|---" * (len(args.batches) + 4) + "|")
    make_inputs = jax.jit(inputs, static_argnums=(0, 1, 2, 3, 4, 5))
    rows = []
    for label, (name, drafts, temperature) in CASES.items():
        options = {"acceptance_length": 0.7 * num_drafts} if name == "synthetic" else {}
        for dtype in args.dtypes:
            for implementation in args.implementations:

                def verify(keys, draft, target, name=name, implementation=implementation, options=options):
                    return getattr(verifiers, name)(
                        keys, draft, target, implementation=implementation, **options
                    ).tokens

                cells = []
                for batch in args.batches:
                    keys = jax.random.split(jax.random.key(1), batch)
                    case = make_inputs(batch, num_drafts, vocab, dtype, drafts, temperature)
                    us = 1e6 * device_seconds(verify, keys, *case)
                    read = batch * (num_drafts + 1 + (drafts == "sampled")) * vocab * jnp.dtype(dtype).itemsize
                    row = {"verifier": label, "dtype": dtype, "implementation": implementation, "batch": batch}
                    rows.append(row | {"num_drafts": num_drafts, "vocab": vocab, "us": us, "floor_bytes": read})
                    cells.append(f"{us:.3g}")
                share = f"{100 * read / PEAK / us * 1e6:.0f}" if jax.default_backend() == "gpu" else "-"
                print(f"| {label} | {dtype} | {implementation} | {' | '.join(cells)} | {share} |", flush=True)
    return rows


def time_cut(args: argparse.Namespace, vocab: int) -> list[dict]:
    rows = []
    print(f"\n| [{CUT_ROWS}, {vocab}], microseconds | dtype | " + " | ".join(args.implementations) + " |")
    print("|---" * (len(args.implementations) + 2) + "|")
    for label, limits in LIMITS.items():
        limits = {name: jnp.full(CUT_ROWS, value) for name, value in limits.items()}
        for dtype in args.dtypes:
            logits = _normal(jax.random.key(0), CUT_ROWS, vocab, dtype=dtype, scale=2)
            for implementation in args.implementations:
                seconds = device_seconds(partial(min_logit, implementation=implementation, **limits), logits)
                entry = {"op": label, "dtype": dtype, "vocab": vocab, "implementation": implementation}
                rows.append(entry | {"us": seconds * 1e6})
            cells = " | ".join(f"{row['us']:.0f}" for row in rows[-len(args.implementations) :])
            print(f"| {label} | {dtype} | {cells} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[5])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--implementations", nargs="+", default=["xla", "pallas"])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        args.implementations = ["xla"]
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}; microseconds")
    rows = []
    for vocab in args.vocabs:
        for num_drafts in args.num_drafts:
            rows += time_verifiers(args, num_drafts, vocab)
        rows += time_cut(args, vocab)
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
