"""Time the attention kernels alone, with a dense cache and with pages, on heads of Llama 3.1 8B.

    python scripts/tune_attention.py
    python scripts/tune_attention.py --pages 64 --few 64x1x4096 --many
    python scripts/tune_attention.py --cache-dtype float8_e4m3fn

A row is BxTxC: B sequences, T new tokens each, C slots before them. It times one call in a loop on the device, which
passes the caches on, so that they are written in place. Few tokens are bound by the bytes of the cache, many by the
products: the script prints TB/s and TFLOP/s.
"""

import argparse
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prompt_attention import prompt_attention

HEADS, KV_HEADS, SIZE = 32, 8, 128
SHORT, LONG, REPEATS = 20, 220, 5  # calls of a short and a long loop, and timed runs of each
FEW = ("1x1x512", "1x6x512", "8x1x4096", "64x1x512", "64x4x512", "64x1x4096", "63x1x400+1x1x8000", "1x64x4096")
MANY = ("1x512x0", "1x512x8192", "1x2048x0", "1x2048x6144", "1x8192x0", "8x512x0")


def sizes_of(row: str) -> tuple[int, list[int]]:
    """Return the new tokens of each sequence, and the filled slots of each, of a row such as 63x1x400+1x1x8000."""
    groups = [[int(size) for size in group.split("x")] for group in row.split("+")]
    return groups[0][1], [start for batch, _, start in groups for _ in range(batch)]


def seconds(kernel, row: str, page_size: int | None, cache_dtype: str) -> float:
    """Return the seconds of one call of a kernel."""
    num_tokens, starts = sizes_of(row)
    batch, start = len(starts), max(starts)
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (batch, num_tokens, HEADS, SIZE), jnp.bfloat16)
    new = jax.random.normal(keys[1], (batch, num_tokens, KV_HEADS, SIZE), jnp.bfloat16)
    slots = -(-(start + num_tokens) // 256) * 256
    table, shape = None, (batch, slots)
    if page_size is not None:
        shape = batch * slots // page_size, page_size
        table = jax.random.permutation(keys[2], shape[0]).reshape(batch, -1).astype(jnp.int32)
    caches = tuple(jnp.ones((*shape, KV_HEADS, SIZE), cache_dtype) for _ in range(2))

    @partial(jax.jit, donate_argnums=1)
    def loop(n, caches, arrays):
        query, new, table = arrays

        def body(i, carry):
            query, caches = carry
            attended, *caches = kernel(query, new, new, *caches, jnp.array(starts), None, table)
            return query + 0 * attended, tuple(caches)  # each call waits for the one before

        return jax.lax.fori_loop(0, n, body, (query, caches))

    medians = []
    for count in (SHORT, LONG):
        times = []
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            _, caches = jax.block_until_ready(loop(count, caches, (query, new, table)))
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times[1:]))
    return (medians[1] - medians[0]) / (LONG - SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--few", nargs="*", default=FEW, help="rows of at most 64 tokens, some of several joined by +")
    parser.add_argument("--many", nargs="*", default=MANY, help="rows of more tokens")
    parser.add_argument("--cache-dtype", choices=("bfloat16", "float8_e4m3fn"), default="bfloat16")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    layouts = [None, *args.pages]
    names = ["dense", *(f"pages of {size}" for size in args.pages)]
    for kernel, rows, unit in ((decode_attention, args.few, "TB/s"), (prompt_attention, args.many, "TFLOP/s")):
        print(f"\n| BxTxC | {' | '.join(f'{name}, us ({unit})' for name in names)} |")
        print("|---" * (len(names) + 1) + "|")
        for row in rows:
            num_tokens, starts = sizes_of(row)
            work = 4 * HEADS * SIZE * num_tokens * sum(start + num_tokens / 2 for start in starts)
            if unit == "TB/s":
                work = 2 * jnp.dtype(args.cache_dtype).itemsize * KV_HEADS * SIZE * sum(starts)
            times = [seconds(kernel, row, layout, args.cache_dtype) for layout in layouts]
            print(f"| {row} | {' | '.join(f'{1e6 * t:.1f} ({work / t / 1e12:.3g})' for t in times)} |")


if __name__ == "__main__":
    main()
