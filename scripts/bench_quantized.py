"""Time the products of a few rows with quantised matrices, beside the same products in bfloat16.

    python scripts/bench_quantized.py
    python scripts/bench_quantized.py --matrices 4096x14336 --formats int4 mxfp4 --rows 1 8
    python scripts/bench_quantized.py --tune --matrices 4096x14336 --formats int4 --rows 1

Each row is printed as soon as it is measured. Before a product is timed, it is compared with the product in float32 of
the floats for which the codes stand: the largest error, in units of the root mean square of the results, must be at
most 2 %.

* Times are of the device, without dispatch. Calls take turns on enough copies of a matrix that the cache does not help.
* TB/s count the bytes of codes and scales. The share of the floor is relative to a copy's bandwidth, measured in this
  run.
* With --tune, the tilings of the kernels are tried one after another, and the default one is marked.
* The run ends after --minutes, with the rows so far.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import timing

from pallas_kernels import quantized_linear, quantized_matmul
from pallas_kernels.launch import NUM_MULTIPROCESSORS
from pallas_kernels.quantized_linear import RowTiling
from pallas_kernels.quantized_matmul import Tiling
from specjax.models.linear import linear
from specjax.models.quantized import Quantized, dequantize, quantize

MATRICES = ("4096x14336", "14336x4096", "4096x6144", "4096x128256")  # inputs x outputs
FORMATS = ("bf16", "int8", "fp8", "fp8-blocks", "int4", "int4-symmetric", "mxfp4")
ROWS = (1, 2, 4, 8, 16, 64)
MAX_ERROR = 2e-2
COPIES_BYTES = 5e8  # ten times the cache of an H100, which would serve a part of one or two copies of a matrix
ROW_TILINGS = tuple(RowTiling(*sizes) for sizes in product((2, 4, 8, 16), (1, 2, 4, 8)))
TILINGS = tuple(
    Tiling(outputs, words, num_warps, num_stages, num_splits)
    for outputs, words, num_warps in (
        (16, 32, 2),
        (16, 64, 2),
        (32, 16, 1),
        (32, 32, 4),
        (64, 16, 1),
        (64, 16, 2),
        (64, 32, 2),
        (64, 16, 4),
        (64, 32, 4),
        (128, 16, 4),
        (128, 32, 4),
        (128, 32, 8),
    )
    for num_stages in (1, 3, 4, 5)
    for num_splits in (1, 2, 4, 8)
)


def copy_bandwidth() -> float:
    """Return the bytes/s that a copy of a large array reads and writes."""
    x = jnp.zeros(2**29 if jax.default_backend() == "gpu" else 2**22, jnp.bfloat16)
    return 2 * x.nbytes / timing.device_seconds(lambda x: x + 1, x)


@partial(jax.jit, static_argnames=("format", "shape"))
def random_weight(format: str, shape: tuple[int, int]) -> jax.Array | Quantized:
    """Return a random matrix [N, K], made on the device."""
    num_rows, size = shape
    key = jax.random.key(0)
    if format == "mxfp4":
        words = jax.lax.bitcast_convert_type(jax.random.bits(key, (num_rows, size // 8), jnp.uint32), jnp.int32)
        scale = jax.random.randint(key, (num_rows, size // 32), 117, 123).astype(jnp.uint8)
        return Quantized(words, scale, bits=4, code="e2m1", group=(1, 32))
    weight = 0.02 * jax.random.normal(key, shape, jnp.bfloat16)
    if format == "bf16":
        return weight
    name, _, kind = format.partition("-")
    quantized = quantize(weight, name)
    if kind == "symmetric":
        return quantized.replace(zero=None)
    if kind == "blocks":
        scale = jax.random.uniform(key, (-(-num_rows // 128), -(-size // 128)), minval=1e-4, maxval=2e-4)
        return quantized.replace(scale=scale, group=(128, 128))
    return quantized


def apply(x: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """Return the product [T, N] of x [T, K] as models compute it."""
    return linear(x[None], weight, transposed=True)[0]


def with_tiling(tiling: RowTiling | Tiling, x: jax.Array, weight: Quantized) -> jax.Array:
    """Return the same product by a kernel with this tiling."""
    if isinstance(tiling, RowTiling):
        return quantized_linear.linear(x[0], weight, tiling=tiling)[None]
    return quantized_matmul.matmul(x, weight, tiling=tiling)


@jax.jit
def error_of(y: jax.Array, x: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """Return the largest error of a product, in units of the root mean square of the results."""
    floats = dequantize(weight) if isinstance(weight, Quantized) else weight.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        reference = x.astype(jnp.float32) @ floats.T
    return jnp.max(jnp.abs(y - reference)) / jnp.sqrt(jnp.mean(reference**2))


def tilings_of(num_rows: int, weight: Quantized) -> Iterator[RowTiling | Tiling]:
    """Yield the tilings that --tune tries, the default one first."""
    num_outputs = weight.shape[0]
    if num_rows == 1:
        yield quantized_linear.default_tiling(weight, num_outputs)
        yield from ROW_TILINGS
        for tiling in ROW_TILINGS:
            if quantized_linear.can_keep_inputs(weight, tiling.num_warps):
                yield tiling._replace(num_programs=max(1, 16 // tiling.num_warps) * NUM_MULTIPROCESSORS)
    else:
        yield quantized_matmul.default_tiling(weight, num_outputs, num_rows)
    yield from TILINGS


def measure(function, x: jax.Array, weight: jax.Array | Quantized) -> tuple[float, float]:
    """Return the seconds of a product and its error."""
    error = float(error_of(jax.jit(function)(x, weight), x, weight))
    return timing.device_seconds(function, x, weight, copies_bytes=COPIES_BYTES), error


def tune(num_rows: int, x: jax.Array, weight: Quantized, deadline: float) -> None:
    """Print the time of each tiling, the fastest ones again at the end."""
    found = []
    for i, tiling in enumerate(tilings_of(num_rows, weight)):
        if time.monotonic() > deadline:
            break
        try:
            seconds, error = measure(partial(with_tiling, tiling), x, weight)
        except Exception as failure:  # a tiling that takes too much shared memory ends as an error of the compiler
            print(f"  {tuple(tiling)} failed: {str(failure).splitlines()[0][:100]}")
            continue
        found.append((seconds, tiling, i == 0))
        print(f"  {tuple(tiling)} {1e6 * seconds:.1f} us {weight.nbytes / seconds / 1e12:.2f} TB/s, error {error:.1e}")
    for seconds, tiling, is_default in sorted(found, key=lambda one: one[0])[:3]:
        mark = ", the default" if is_default else ""
        print(f"  best: {tiling} {1e6 * seconds:.1f} us{mark}")


def time_products(args: argparse.Namespace, bandwidth: float, deadline: float) -> list[dict]:
    """Print the table of products until the deadline, and return its rows."""
    print("| matrix | format | rows | us | TB/s | against bf16 | floor / measured, % | error |\n" + "|---" * 8 + "|")
    found = []
    for name, format in product(args.matrices, args.formats):
        size, num_outputs = map(int, name.split("x"))
        weight = random_weight(format, (num_outputs, size))
        for num_rows in args.rows:
            if time.monotonic() > deadline:
                print(f"stopped after {args.minutes} minutes")
                return found
            x = jax.random.normal(jax.random.key(1), (num_rows, size), jnp.bfloat16)
            seconds, error = measure(apply, x, weight)
            row = {"matrix": name, "format": format, "num_rows": num_rows, "bytes": weight.nbytes}
            found.append(row | {"us": 1e6 * seconds, "error": error})
            print_row(found, bandwidth)
            if args.tune and isinstance(weight, Quantized):
                tune(num_rows, x, weight, deadline)
    return found


def print_row(rows: list[dict], bandwidth: float) -> None:
    """Print the last of the rows, beside the row of bfloat16 that it is compared with."""
    row = rows[-1]
    names = "matrix", "format", "num_rows"
    baseline = row | {"format": "bf16"}
    same = [one["us"] for one in rows if all(one[name] == baseline[name] for name in names)]
    seconds, error = row["us"] / 1e6, row["error"]
    cells = [*(row[name] for name in names), f"{row['us']:.1f}", f"{row['bytes'] / seconds / 1e12:.2f}"]
    cells += [f"{same[0] / row['us']:.2f}" if same else "-", f"{100 * row['bytes'] / bandwidth / seconds:.0f}"]
    print(f"| {' | '.join(map(str, [*cells, f'{error:.1e}']))} |{'' if error <= MAX_ERROR else ' WRONG'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="+", default=MATRICES, help="inputs x outputs, such as 4096x14336")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tune", action="store_true", help="try the tilings of the kernels")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "bandwidth": copy_bandwidth()}
    print(f"device {about['device']}, jax {about['jax']}, a copy reaches {about['bandwidth'] / 1e12:.2f} TB/s\n")
    rows = time_products(args, about["bandwidth"], time.monotonic() + 60 * args.minutes)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    num_wrong = sum(not row["error"] <= MAX_ERROR for row in rows)
    print(f"{num_wrong} wrong")
    if num_wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
