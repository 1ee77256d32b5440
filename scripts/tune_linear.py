"""Time the product of one token with the matrices of a decoder, by XLA and by the kernel, for numbers of warps.

    python scripts/tune_linear.py

XLA multiplies two rows, which it does faster than one; its time includes the norm, the gate and the sum, as the
kernel's does. Each call reads another copy of the matrix, as many as make the cache useless.
"""

from functools import partial

import jax
import jax.numpy as jnp
import timing
from bench_decode import PEAK, SHAPES

from pallas_kernels.linear import linear
from specjax.models import linear as models

EPSILON = 1e-5
timing.MAX_COPIES, timing.CACHE_BYTES = 24, 4e8


def products(config) -> dict[str, tuple[int, int, bool, bool]]:
    """Of a layer: numbers in and out; whether with a norm and a gate, else with a sum."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_size
    return {
        "qkv": (hidden, heads + 2 * config.num_kv_heads * config.head_size, True, False),
        "attention out": (heads, hidden, False, False),
        "gate and up": (hidden, 2 * config.mlp_size, True, True),
        "mlp out": (config.mlp_size, hidden, False, False),
    }


def microseconds(function, *arrays: jax.Array) -> float:
    return 1e6 * timing.device_seconds(function, *arrays)


def main() -> None:
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16, microseconds\n")
    print("| product | floor | XLA | kernel | with 4 warps | 8 | 16 | 32 |\n|---|---|---|---|---|---|---|---|")
    for model in ("1b", "8b"):
        for name, (size, num_rows, has_norm, has_gate) in products(SHAPES[model]).items():
            keys = jax.random.split(jax.random.key(0), 3)
            x = jax.random.normal(keys[0], (1, 2, size), jnp.bfloat16)
            weight = 0.02 * jax.random.normal(keys[1], (num_rows, size), jnp.bfloat16)
            scale = jnp.ones(size, jnp.bfloat16) if has_norm else None
            residual = None if has_norm else jax.random.normal(keys[2], (1, 2, num_rows), jnp.bfloat16)
            activation = jax.nn.silu if has_gate else None

            def product(x, weight, scale, residual, function, activation=activation):
                norm = None if scale is None else (scale, EPSILON)
                return function(x, weight, norm=norm, activation=activation, residual=residual)

            xla = partial(product, function=partial(models.linear, transposed=True))
            times = [1e6 * weight.nbytes / PEAK, microseconds(xla, x, weight, scale, residual)]
            one = x[0, 0], weight, scale, None if residual is None else residual[0, 0]
            for num_warps in (None, 4, 8, 16, 32):
                kernel = partial(product, function=partial(linear, num_warps=num_warps))
                times.append(microseconds(kernel, *one))
            print(f"| {model} {name} | {' | '.join(f'{us:.1f}' for us in times)} |", flush=True)


if __name__ == "__main__":
    main()
