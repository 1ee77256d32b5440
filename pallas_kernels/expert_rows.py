"""The products of few rows with the matrices of their experts, where the matrices have codes.

Few rows seldom share an expert. So each pair of a row and an expert is a product of one row, as `quantized_linear`
computes it: for one row the tensor cores would take as long as for 16. Pairs that share an expert read its codes from
the cache. A matrix that every row passes through is multiplied in the same launch, where it is like an expert's.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import Entry, call
from pallas_kernels.quantized import Quantized
from pallas_kernels.quantized_linear import RowTiling, default_tiling, quantized_linear_kernel
from pallas_kernels.triton import plgpu

_WARP = 32  # threads in a warp


def products(
    x: Array,
    weight: Quantized,
    experts: Array,
    *,
    shared: Quantized | None = None,
    bias: Array | None = None,
    gate: Callable[[Array, Array], Array] | None = None,
    is_interleaved: bool = False,
    dtype: DTypeLike | None = None,
    tiling: RowTiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply a row by the matrix of an expert for each of P pairs, summing in float32.

    Args:
        x: [T, K] float32, bfloat16 or float16, or [P, K] for pairs that have inputs of their own.
        weight: [E, N, K], of codes that `quantized.unsupported_codes` allows.
        experts: [T, k] int32, the experts of each row, which are its first pairs.
        shared: [N, K], the matrix of one more pair of each row, the last; None for none. Then there is no bias.
        bias: [E, N] floats, added to the products.
        gate: function of two halves of the N products, which gives the results; None gives the products themselves.
        is_interleaved: whether the halves alternate; otherwise one comes after the other.
        dtype: of the result; None is the dtype of x.
        tiling: how a matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [P, N], or with a gate [P, N / 2].
    """
    num_rows, num_chosen = experts.shape
    num_pairs = num_rows * (num_chosen + (shared is not None))
    num_outputs = weight.shape[1] // (1 if gate is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs, num_pairs)
    num_programs = tiling.num_programs_of(num_outputs, num_pairs)
    return call(
        partial(
            _expert_row_kernel,
            epsilon=None,
            offset=0.0,
            gate=gate,
            is_interleaved=is_interleaved,
            tile=(tiling.outputs, tiling.num_warps * _WARP),
            num_programs=num_programs,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((num_pairs, num_outputs), dtype or x.dtype),
        (x, weight, shared, bias, experts),
        grid=(num_programs, num_pairs),
        num_warps=tiling.num_warps,
        interpret=interpret,
    )


def _expert_row_kernel(inputs, out_ref, **options):
    x_ref, weight, shared, bias_ref, experts_ref = inputs
    (num_rows, num_chosen), num_pairs = experts_ref.shape, out_ref.shape[0]
    program, pair, pairs_of_row = pl.program_id(0), pl.program_id(1), num_pairs // num_rows
    number = pair % pairs_of_row
    x_ref = Entry(x_ref, pair // (num_pairs // x_ref.shape[0]))

    def multiply(weight: Quantized, bias_ref) -> None:
        quantized_linear_kernel((x_ref, weight, None, bias_ref, None), Entry(out_ref, pair), program=program, **options)

    def by_expert() -> None:
        expert = plgpu.load(experts_ref.at[pair // pairs_of_row, number])
        multiply(*jax.tree.map(lambda ref: Entry(ref, expert), (weight, bias_ref)))

    if shared is None:
        by_expert()
    else:
        pl.when(number < num_chosen)(by_expert)
        pl.when(number == num_chosen)(partial(multiply, shared, None))
