"""The product of many rows with a quantised matrix on GPUs of Hopper's generation.

The kernel (`pallas_kernels.hopper`) copies tiles to shared memory ahead of the tensor cores, and decodes codes while
they multiply. It is faster than `quantized_matmul` from some twenty rows on, for some matrices of e4m3 from two rows
on, and has no limit of rows. It needs Mosaic GPU, which JAX changes often: the versions of JAX with which it ran are
named here, and others do without it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, compute_capability
from pallas_kernels.quantized import Quantized, unsupported_weight
from pallas_kernels.quantized_inputs import arranged, order_of_tiles

TRIED = "0.11."  # versions of JAX with which the kernel ran
CODES = 128  # of a row in a tile
_FEW_ROWS, _MANY_ROWS = 16, 1024  # as fast or faster: up to these `quantized_matmul`, beyond those XLA with floats
_SMALL = 2**19  # numbers of a matrix; the time of a smaller one is the start of its kernels
_LARGE = 2**25  # numbers of a matrix of e4m3 from which the kernel is the faster one for few rows, too
_WAVE = 128 * NUM_MULTIPROCESSORS  # outputs of the programs that run at once, with 128 each
_MOST_ROWS = 128  # of a program
_MOST_STAGES = 8
_SHARED_BYTES = 226 * 1024  # of a program, without barriers


class Tiling(NamedTuple):
    """How a product is split among programs, and by each program over time."""

    outputs: int  # rows of the matrix of a program, 128 or 256; with an activation 256, half of them from each half
    rows: int  # of x of a program, a multiple of 8, at most 128
    num_splits: int = 1  # programs that share the inputs of an output


def unsupported(x: Array, weight: Quantized) -> str | None:
    """Return why the kernel cannot multiply x [..., K] by a weight [N, K], or None where it can."""
    if not jax.__version__.startswith(TRIED):
        return f"the kernel was tried with jax {TRIED}*, got {jax.__version__}"
    if compute_capability() != "9.0":
        return f"the kernel needs a GPU of compute capability 9.0, got {compute_capability()}"
    if jax.typeof(x).manual_axis_type.varying:
        return "the kernel takes arrays of one device, got a part of a shared one"
    return unsupported_case(x, weight)


def unsupported_case(x: Array, weight: Quantized) -> str | None:
    """Return what `unsupported` returns, whatever the machine is."""
    if x.dtype != jnp.bfloat16:
        return f"the kernel takes bfloat16 rows, got {x.dtype}"
    if (reason := unsupported_weight(weight)) is not None:
        return reason
    if weight.minimum is not None or weight.code not in ("int", "e4m3") or weight.scale.dtype == jnp.uint8:
        return f"the kernel takes integers and e4m3, without a minimum and with floats as scales, got {weight.code}"
    if weight.zero is not None and (weight.bits == 8 or not jnp.issubdtype(weight.zero.dtype, jnp.integer)):
        return "the kernel takes zeros that are integers, beside codes of 4 bits"
    num_codes = weight.values.shape[1] * weight.places
    if weight.group[1] % CODES or num_codes % CODES or num_codes < 2 * CODES or weight.shape[0] % 128:
        return f"the kernel takes 256 inputs or more, {CODES} n of them, groups of {CODES} n, and 128 n outputs"
    return None


def is_worthwhile(x: Array, weight: Quantized) -> bool:
    """Return whether the kernel is faster than the other ones and than XLA."""
    num_rows = x.size // x.shape[-1]
    if num_rows <= _FEW_ROWS:
        return num_rows > 1 and weight.code == "e4m3" and weight.size >= _LARGE and weight.shape[0] <= _WAVE
    return num_rows <= _MANY_ROWS and weight.size >= _SMALL


def default_tiling(weight: Quantized, num_rows: int, has_activation: bool) -> Tiling:
    """Choose a tiling that fills the device. Few programs share the inputs of an output, as each writes its sums."""
    row_tiles = pl.cdiv(num_rows, _MOST_ROWS)
    rows = 8 * pl.cdiv(pl.cdiv(num_rows, row_tiles), 8)
    num_tiles = weight.values.shape[1] * weight.places // CODES
    if num_rows <= _FEW_ROWS and weight.shape[0] < _WAVE // 2 and not has_activation:
        # Sums of few rows are small, so that any number of programs shares them.
        for outputs in (256, 128):
            num_splits = max(1, NUM_MULTIPROCESSORS // pl.cdiv(weight.shape[0], outputs))
            if num_tiles >= 8 * num_splits > 8:
                return Tiling(outputs, rows, num_splits)
    num_splits, outputs = 1, 256
    if row_tiles == 1 and not has_activation and weight.shape[0] < _WAVE:
        outputs = 128
    programs = pl.cdiv(weight.shape[0], outputs) * row_tiles
    while programs * num_splits * 2 <= 1.1 * NUM_MULTIPROCESSORS and num_tiles >= 16 * num_splits:
        num_splits *= 2
    return Tiling(outputs, rows, num_splits)


def num_stages(weight: Quantized, tiling: Tiling, staged_bytes: int) -> int:
    """Return the number of tiles that fit the shared memory of a program beside the results on their way out."""
    of_tile = CODES * (tiling.outputs * weight.bits // 8 + tiling.rows * 2)
    return min(_MOST_STAGES, (_SHARED_BYTES - staged_bytes) // of_tile)


def matmul(
    x: Array,
    weight: Quantized,
    *,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
) -> Array:
    """Multiply rows by each row of a matrix, summing in float32.

    Args:
        x: [T, K] bfloat16.
        weight: [N, K] that `unsupported_case` knows. Codes of 8 bits with a scale for each output are not rounded, and
            inputs become float16 times a power of two, which is exact down to 2^-31 of the largest input of a row.
            Other codes are rounded to bfloat16 after their scale.
        norm: scale [K], epsilon and optionally an offset: a row is first divided by its root mean square and multiplied
            by the scale, to which the offset is added.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [T, N], or [T, N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the product is split; None chooses it by the sizes.

    Returns:
        [T, N], or with an activation [T, N / 2].
    """
    from pallas_kernels import hopper  # other versions of JAX may lack its imports

    num_rows, dtype = x.shape[0], dtype or x.dtype
    tiling = tiling or default_tiling(weight, num_rows, activation is not None)
    is_split, is_half = tiling.num_splits > 1, hopper.has_half(weight)
    inputs = arranged(
        x,
        weight,
        weight.values.shape[1] * weight.places,
        num_rows=num_rows + -num_rows % 8,
        dtype=jnp.float16 if is_half else None,
        order=order_of_tiles(weight.places),
        norm=norm,
    )
    y = hopper.product(inputs, weight, tiling, activation, jnp.dtype(jnp.float32 if is_split else dtype))
    y = y[..., :num_rows, :]
    if not is_split:
        return y if residual is None else residual + y
    y = jnp.sum(y, axis=0)
    y = y[0] if activation is None else activation(y[0]) * y[1]
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(dtype)
