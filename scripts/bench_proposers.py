"""Device time of looking up n-grams on this machine's accelerator.

    python scripts/bench_proposers.py

prints a table: microseconds of one `proposers.ngram` for the sequences of a batch, timed as `bench_verify.py` does.
Floor: each token of the buffer read once.
"""

import jax
import jax.numpy as jnp
from bench_verify import PEAK, device_seconds

from specjax import Context, proposers

SHAPES = [(1, 4096), (8, 4096), (64, 4096), (64, 32768)]
NUM_DRAFTS, MAX_N, VOCAB = 5, 4, 50


def main() -> None:
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, K = {NUM_DRAFTS}, n in [1, {MAX_N}], {VOCAB} different tokens")
    print("\n| B | L | microseconds | memory floor |\n|---|---|---|---|")
    proposer = proposers.ngram(NUM_DRAFTS, max_n=MAX_N)
    for batch_size, size in SHAPES:
        key = jax.random.key(0)
        tokens = jax.random.randint(key, (batch_size, size), 0, VOCAB, jnp.int32)
        context = Context(tokens, jnp.full(batch_size, size - 9), jnp.ones(batch_size, bool))

        def propose(keys, context):
            return proposer.propose(keys, context, None, ())[0].tokens

        seconds = device_seconds(propose, jax.random.split(key, batch_size), context)
        print(f"| {batch_size} | {size} | {1e6 * seconds:.1f} | {1e6 * tokens.nbytes / PEAK:.1f} |")


if __name__ == "__main__":
    main()
