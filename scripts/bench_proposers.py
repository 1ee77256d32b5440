"""Measure the device time of n-gram look-up on this machine's accelerator.

    python scripts/bench_proposers.py

The script prints a table of the microseconds that one `proposers.ngram` takes for all sequences of a batch, each row as
soon as it is measured. The floor is the time to read each token of the buffer once.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import peers
from bench_verify import PEAK, device_seconds

from specjax import Context, proposers

SHAPES = [(1, 4096), (8, 4096), (64, 4096), (64, 32768)]  # batch size, buffer length
NUM_DRAFTS, MAX_N, VOCAB = 5, 4, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    device = jax.devices()[0].device_kind
    print(f"device {device}, jax {jax.__version__}, K = {NUM_DRAFTS}, n in [1, {MAX_N}], {VOCAB} different tokens.")
    print(f"{peers.NONE}\n\n| B | L | microseconds | floor on an H200 |\n|---|---|---|---|")
    rows = []
    proposer = proposers.ngram(NUM_DRAFTS, max_n=MAX_N)
    for batch_size, size in SHAPES:
        key = jax.random.key(0)
        tokens = jax.random.randint(key, (batch_size, size), 0, VOCAB, jnp.int32)
        context = Context(tokens, jnp.full(batch_size, size - 9), jnp.ones(batch_size, bool))

        def propose(keys, context):
            return proposer.propose(keys, context, None, ())[0].tokens

        us = 1e6 * device_seconds(propose, jax.random.split(key, batch_size), context)
        rows.append({"batch": batch_size, "length": size, "num_drafts": NUM_DRAFTS, "us": us})
        print(f"| {batch_size} | {size} | {us:.1f} | {1e6 * tokens.nbytes / PEAK:.1f} |")
    if args.json:
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
