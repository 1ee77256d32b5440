"""Time the verification kernels at many tile sizes and numbers of warps on this machine's GPU.

    python scripts/tune_verify.py --batches 1 64 256 --dtypes bfloat16

For each kernel, batch size and dtype, the script prints the microseconds and options of the four fastest choices, and
the microseconds of the slowest.
"""

import argparse
from functools import partial
from itertools import product

import jax
from bench_verify import CASES, inputs
from timing import device_seconds

from pallas_kernels.accept import accept
from pallas_kernels.recover import recover
from pallas_kernels.rules import accept_by_ratio
from pallas_kernels.sample import sample
from pallas_kernels.statistics import row_statistics
from specjax.verifiers import kernels

VOCAB, NUM_DRAFTS = 128256, 5
TILES, WARPS = (2048, 4096, 8192, 16384), (4, 8, 16)


def cases(batch: int, dtype: str):
    """Yield for each kernel: a label, the function, its arrays, and the options to try."""
    draft, target = inputs(batch, NUM_DRAFTS, VOCAB, dtype, CASES["rejection"])
    key_data = jax.random.key_data(jax.random.split(jax.random.key(1), batch))
    to_verify = kernels.as_batch(draft, target, bonus_tokens=None)
    statistics, draw = partial(row_statistics, streams=kernels.STREAMS), partial(sample, purpose=0)
    found = jax.jit(statistics)(key_data, to_verify)
    tiled = [{"tile_size": tile, "num_warps": warps} for tile, warps in product(TILES, WARPS)]
    yield "statistics", statistics, (key_data, to_verify), tiled
    arrays = to_verify, found, None
    yield "accept", partial(accept, rule=accept_by_ratio), arrays, [{"num_warps": warps} for warps in (1, 2, 4, 8)]
    for label, rule in (("recover", accept_by_ratio), ("block recover", None)):
        yield label, recover, (to_verify, found, accept(*arrays, rule=rule)), tiled
    to_match = to_verify._replace(draft=None)
    yield "sample", draw, (key_data, to_match), tiled[:9]
    yield "sample, draw", draw, (key_data, to_match), [{"draw_num_warps": warps} for warps in (1, 2, 4, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    for dtype, batch in product(args.dtypes, args.batches):
        for label, function, arrays, options in cases(batch, dtype):
            times = []
            for option in options:
                us = 1e6 * device_seconds(lambda *a, function=function, option=option: function(*a, **option), *arrays)
                times.append((us, option))
            times.sort(key=lambda pair: pair[0])
            shown = "; ".join(f"{us:.1f} {tuple(option.values())}" for us, option in times[:4])
            print(f"{dtype} B = {batch} {label}: {shown}; worst {times[-1][0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
