"""Time the matrix products of a decoder with one row, and with a few rows, by XLA and by the kernels.

    python scripts/tune_linear.py

The script prints two tables of microseconds: the kernel for one row at each number of warps, and the kernel for a few
rows at each choice of tile, warps and stages. For one row, XLA gets a second row of padding, with which it is faster.
All times include the norm, the gate and the residual of the product. Calls take turns on enough copies of the matrix
that the cache does not help.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import timing
from bench_decode import PEAK, SHAPES

from pallas_kernels.linear import linear
from pallas_kernels.matmul import Tiling, matmul
from specjax.models.linear import rms_norm

EPSILON = 1e-5
WARPS = (4, 8, 16, 32)
TILINGS = tuple(Tiling(*sizes) for sizes in ((16, 256, 2, 5), (32, 256, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4)))
timing.MAX_COPIES, timing.CACHE_BYTES = 24, 4e8


def products(config) -> dict[str, tuple[int, int, bool, bool]]:
    """Return inputs, outputs, whether there is a norm and whether there is a gate, for each product of a decoder.

    A product without a norm has a residual.
    """
    hidden, heads = config.hidden_size, config.num_heads * config.head_size
    return {
        "qkv": (hidden, heads + 2 * config.num_kv_heads * config.head_size, True, False),
        "attention out": (heads, hidden, False, False),
        "gate and up": (hidden, 2 * config.mlp_size, True, True),
        "mlp out": (config.mlp_size, hidden, False, False),
        "head": (hidden, config.vocab_size, True, False),
    }


def by_xla(x: jax.Array, weight: jax.Array, scale=None, residual=None, activation=None) -> jax.Array:
    """Return the product of XLA."""
    num_rows = x.shape[0]
    if num_rows == 1:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    y = _normed(x, scale) @ weight.T
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=-1)
        y = activation(gate) * up
    return y[:num_rows] if residual is None else y[:num_rows] + residual


def by_one_row(x: jax.Array, weight: jax.Array, scale=None, residual=None, **options) -> jax.Array:
    """Return the product of the kernel for one row."""
    norm = None if scale is None else (scale, EPSILON)
    return linear(x[0], weight, norm=norm, residual=None if residual is None else residual[0], **options)


def by_few_rows(x: jax.Array, weight: jax.Array, scale=None, residual=None, **options) -> jax.Array:
    """Return the product of the kernel for a few rows."""
    return matmul(_normed(x, scale), weight, residual=residual, **options)


def _normed(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else rms_norm(x[None], (scale, EPSILON))[0]


def table(title: str, num_rows: int, functions: dict[str, Callable]) -> None:
    """Print the time of each product by each function."""
    print(f"\n{title}\n\n| product | floor | {' | '.join(functions)} |\n|{'---|' * (2 + len(functions))}")
    for model in ("1b", "8b"):
        for name, (size, num_outputs, has_norm, has_gate) in products(SHAPES[model]).items():
            keys = jax.random.split(jax.random.key(0), 3)
            weight = 0.02 * jax.random.normal(keys[1], (num_outputs, size), jnp.bfloat16)
            arguments = {"x": jax.random.normal(keys[0], (num_rows, size), jnp.bfloat16), "weight": weight}
            if has_norm:
                arguments["scale"] = jnp.ones(size, jnp.bfloat16)
            else:
                arguments["residual"] = jax.random.normal(keys[2], (num_rows, num_outputs), jnp.bfloat16)
            options = {"activation": jax.nn.silu} if has_gate else {}
            times = [1e6 * weight.nbytes / PEAK]
            for function in functions.values():
                call = partial(function, **options)
                times.append(1e6 * timing.device_seconds(lambda given, call=call: call(**given), arguments))
            print(f"| {model} {name} | {' | '.join(f'{us:.1f}' for us in times)} |", flush=True)


def main() -> None:
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16, microseconds")
    one_row = {f"{n} warps": partial(by_one_row, num_warps=n) for n in WARPS}
    few_rows = {
        f"{t.outputs} x {t.width}, {t.num_warps} warps, {t.num_stages} stages": partial(by_few_rows, tiling=t)
        for t in TILINGS
    }
    table("One row", 1, {"XLA": by_xla, "one row": by_one_row, **one_row, "few rows": by_few_rows})
    table("Six rows", 6, {"XLA": by_xla, "few rows": by_few_rows, **few_rows})


if __name__ == "__main__":
    main()
