"""Measure the device time of verification on this machine's accelerator, by XLA and by the Pallas kernels.

    python scripts/bench_verify.py
    python scripts/bench_verify.py --vocabs 32000 128256 151936 --num-drafts 1 3 5 8
    python scripts/bench_verify.py --batches 8 --num-drafts 7 --dtypes float32 --cases rejection block

The script prints the tables of the README, each row as soon as it is measured. Cells of the kernels also say how many
times faster than XLA they are. The floor is the time to read each target row once and, if drafts are sampled, one draft
row per sequence. As in decoding, the draft's log-normaliser and cut are given; the target's cut, in the cases that have
one, is computed within the measured time. At V = 128256 and K = 5, figures of other systems (`peers.py`) stand under
the rows.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import peers
from timing import device_seconds

from specjax import Categorical, Draft, verifiers
from specjax.sampling.cut import min_logit

CUT_ROWS = 384  # rows of logits in the table of cuts
TOP_K, TOP_P = 50, 0.9
LIMITS = {
    "cut, top-k 50 and top-p 0.9": {"temperature": 0.8, "top_k": TOP_K, "top_p": TOP_P},
    "cut, top-p 0.9 of a flat distribution": {"top_p": 0.9},  # keeps a quarter of the vocabulary
}
PEAK = 4.3e12  # bytes/s that a copy reaches on an H200
CASES = {  # label: verifier, kind of drafts, temperature, whether there is a cut
    "rejection": ("rejection", "sampled", None, False),
    "rejection, temperature 0.8": ("rejection", "sampled", 0.8, False),
    "rejection, temperature 0.8, top-k 50, top-p 0.9": ("rejection", "sampled", 0.8, True),
    "block": ("block", "sampled", None, False),
    "match, or deterministic drafts": ("match", "deterministic", None, False),
    "the same, all of them accepted": ("match", "accepted", None, False),
    "typical": ("typical", "deterministic", None, False),
    "synthetic": ("synthetic", "sampled", None, False),
}


def _normal(key: jax.Array, *shape: int, dtype, scale: float) -> jax.Array:
    """Return normal numbers drawn in float32, because numbers drawn in bfloat16 have many equal maxima."""
    return (scale * jax.random.normal(key, shape)).astype(dtype)


def with_cut(distribution: Categorical, implementation: str | None = None) -> Categorical:
    """Return the distribution with the cut of TOP_K and TOP_P."""
    temperature = distribution.temperature[:, None]
    limits = {"temperature": temperature, "top_k": jnp.full_like(temperature, TOP_K, jnp.int32), "top_p": TOP_P}
    return distribution._replace(min_logit=min_logit(distribution.logits, **limits, implementation=implementation))


def inputs(batch: int, num_drafts: int, vocab: int, dtype, case: tuple) -> tuple[Draft, Categorical]:
    """Return drafts and target for a case.

    Sampled drafts are accepted with a probability of about 0.7. Deterministic drafts are hardly ever accepted, or
    always in the case "accepted".
    """
    _, drafts, temperature, has_cut = case
    keys = jax.random.split(jax.random.key(0), 3)
    temperature = None if temperature is None else jnp.full(batch, temperature)
    scale = 1 if temperature is None else 1 / temperature[:, None, None]
    target = _normal(keys[0], batch, num_drafts + 1, vocab, dtype=dtype, scale=2)
    logits = target[:, :num_drafts] + _normal(keys[1], batch, num_drafts, vocab, dtype=dtype, scale=0.5)
    distribution, scaled = Categorical(logits, temperature), logits.astype(jnp.float32) * scale
    if has_cut:
        distribution = with_cut(distribution)
        scaled = jnp.where(logits >= distribution.min_logit[..., None], scaled, -jnp.inf)
    tokens = jnp.argmax(scaled + jax.random.gumbel(keys[2], logits.shape), axis=-1).astype(jnp.int32)
    distribution = distribution._replace(log_normalizer=jax.scipy.special.logsumexp(scaled, axis=-1))
    if drafts == "accepted":
        sequence, position = jnp.arange(batch)[:, None], jnp.arange(num_drafts)[None]
        target = target.at[sequence, position, tokens].set(100)
    return Draft(tokens, distribution if drafts == "sampled" else None), Categorical(target, temperature)


def verify(name: str, has_cut: bool, implementation: str, options: dict, keys, draft, target) -> jax.Array:
    """Return the tokens that a verifier emits, after cutting the target if the case has a cut."""
    target = with_cut(target, implementation) if has_cut else target
    return getattr(verifiers, name)(keys, draft, target, implementation=implementation, **options).tokens


def measure(label: str, dtype: str, implementation: str, batches: list[int], num_drafts: int, vocab: int) -> list[dict]:
    """Time one case with one dtype and implementation at each batch size."""
    name, drafts, _, has_cut = case = CASES[label]
    options = {"acceptance_length": 0.7 * num_drafts} if name == "synthetic" else {}
    call = partial(verify, name, has_cut, implementation, options)
    make_inputs = jax.jit(inputs, static_argnums=(0, 1, 2, 3, 4))
    rows = []
    for batch in batches:
        keys = jax.random.split(jax.random.key(1), batch)
        us = 1e6 * device_seconds(call, keys, *make_inputs(batch, num_drafts, vocab, dtype, case))
        read = batch * (num_drafts + 1 + (drafts == "sampled")) * vocab * jnp.dtype(dtype).itemsize
        row = {"verifier": label, "dtype": dtype, "implementation": implementation, "batch": batch}
        rows.append(row | {"num_drafts": num_drafts, "vocab": vocab, "us": us, "floor_bytes": read})
    return rows


def print_row(rows: list[dict], us_by_xla: dict[int, float]) -> None:
    """Print one line of the table: the times at all batch sizes, compared to XLA's times by batch size."""
    cells = []
    for row in rows:
        faster = f" ({us_by_xla[row['batch']] / row['us']:.1f} x)" if row["batch"] in us_by_xla else ""
        cells.append(f"{row['us']:.3g}{faster}")
    last = rows[-1]
    share = f"{100 * last['floor_bytes'] / PEAK / last['us'] * 1e6:.0f}" if jax.default_backend() == "gpu" else "-"
    cells += [f"{last['floor_bytes'] / 1e6:.0f}", share]
    print(f"| {last['verifier']} | {last['dtype']} | {last['implementation']} | {' | '.join(cells)} |")


def time_verifiers(args: argparse.Namespace, cases: list[str], num_drafts: int, vocab: int) -> list[dict]:
    """Print a table of verifiers and return its rows."""

    def peers_of(label: str, dtype: str) -> list[peers.Peer]:
        return peers.of_verification(label, dtype, vocab, num_drafts, args.batches)

    has_peers = any(peers_of(label, dtype) for label in cases for dtype in args.dtypes)
    print(f"\nV = {vocab}, K = {num_drafts}. {peers.VERIFY_SOURCE if has_peers else peers.NONE}\n")
    columns = [*(f"B = {b}" for b in args.batches), f"MB of the floor at B = {args.batches[-1]}", "% of it in the time"]
    print(f"| verifier | dtype | implementation | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 3) + "|")
    rows = []
    for label in cases:
        for dtype in args.dtypes:
            us_by_xla = {}
            for implementation in args.implementations:
                measured = measure(label, dtype, implementation, args.batches, num_drafts, vocab)
                print_row(measured, us_by_xla)
                rows += measured
                if implementation == "xla":
                    us_by_xla = {row["batch"]: row["us"] for row in measured}
            for peer in peers_of(label, dtype):
                row = {"verifier": label, "dtype": dtype, "peer": peer.name, "num_drafts": num_drafts, "vocab": vocab}
                rows += [row | {"batch": batch, "us": us} for batch, us in peer.us.items()]
                cells = " | ".join(f"{peer.us[batch]:.3g}" if batch in peer.us else "-" for batch in args.batches)
                print(f"| {label} | {dtype} | peer: {peer.name} | {cells} | - | - |")
    return rows


def time_cut(args: argparse.Namespace, cases: list[str], vocab: int) -> list[dict]:
    """Print a table of the time to find the cut of logits, and return its rows."""
    rows = []
    print(
        f"\n{peers.NONE}\n\n| [{CUT_ROWS}, {vocab}], microseconds | dtype | " + " | ".join(args.implementations) + " |"
    )
    print("|---" * (len(args.implementations) + 2) + "|")
    for label in cases:
        limits = {name: jnp.full(CUT_ROWS, value) for name, value in LIMITS[label].items()}
        for dtype in args.dtypes:
            logits = _normal(jax.random.key(0), CUT_ROWS, vocab, dtype=dtype, scale=2)
            for implementation in args.implementations:
                seconds = device_seconds(partial(min_logit, implementation=implementation, **limits), logits)
                entry = {"op": label, "dtype": dtype, "vocab": vocab, "implementation": implementation}
                rows.append(entry | {"us": seconds * 1e6})
            cells = " | ".join(f"{row['us']:.0f}" for row in rows[-len(args.implementations) :])
            print(f"| {label} | {dtype} | {cells} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[5])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--implementations", nargs="+", default=["xla", "pallas"])
    parser.add_argument("--cases", nargs="+", choices=(*CASES, *LIMITS), default=[*CASES, *LIMITS], metavar="CASE")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    if jax.default_backend() != "gpu":
        args.implementations = ["xla"]
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}; microseconds")
    rows, to_verify = [], [case for case in args.cases if case in CASES]
    to_cut = [case for case in args.cases if case in LIMITS]
    for vocab in args.vocabs:
        for num_drafts in args.num_drafts if to_verify else ():
            rows += time_verifiers(args, to_verify, num_drafts, vocab)
        if to_cut:
            rows += time_cut(args, to_cut, vocab)
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
