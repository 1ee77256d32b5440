"""Products with the matrices of a network, together with the norm, the gate or the sum that stands beside them."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import linear as one_row
from pallas_kernels import matmul as few_rows
from pallas_kernels import quantized_linear as quantized_row
from pallas_kernels import quantized_matmul as quantized_rows
from pallas_kernels import quantized_tiles
from specjax.models.quantized import Quantized, dequantize, rows
from specjax.operations.dispatch import dispatch, has_static_shape, is_partitioned
from specjax.types import Array

FEW_ROWS = 8  # rows up to which CPUs multiply matrices of floats in chunks of inputs
NORMED_ROWS = 8  # rows of 16 bits that a kernel norms and multiplies by a small matrix, each by itself


class Norm(NamedTuple):
    """A root-mean-square norm. Kernels add the offset, because its sum with the scale would take a launch."""

    scale: Array  # [D], or [H, D] where each of H heads has another one
    epsilon: float
    offset: float = 0.0  # number added to the scale

    @classmethod
    def of(cls, norm: "AnyNorm | tuple[Array, float]") -> "AnyNorm":
        """Return a norm that may be given as scale and epsilon."""
        return norm if isinstance(norm, AnyNorm) else cls(norm[0], norm[1])


class CentredNorm(NamedTuple):
    """A norm that subtracts the mean first, as LayerNorm does. No kernel takes it with its product."""

    scale: Array  # as in `Norm`
    epsilon: float
    offset: float = 0.0  # number added to the scale
    bias: Array | None = None  # of the shape of the scale, added at the end; None for none


AnyNorm = Norm | CentredNorm


def with_scale(norm: Norm | None, scale: Array | None) -> Norm | None:
    """Return a norm whose scale an operation was given as an operand; None where there is none."""
    return None if norm is None or scale is None else norm._replace(scale=scale)


def rms_norm(x: Array, norm: AnyNorm | tuple[Array, float], axis_name: str | None = None) -> Array:
    """Scale x [B, T, ..., D] to unit root mean square over its last axis, in float32, then by the norm's scale.

    A `CentredNorm` subtracts the mean before, and may add a bias. With an axis name the devices along it share the last
    axis, and each has D numbers of it.
    """
    scale, epsilon, offset, *_ = Norm.of(norm)

    def mean(x: Array) -> Array:
        own = jnp.mean(x, axis=-1, keepdims=True)
        return own if axis_name is None else jax.lax.pmean(own, axis_name)

    x32 = x.astype(jnp.float32)
    x32 = x32 - mean(x32) if isinstance(norm, CentredNorm) else x32
    x32 = x32 * jax.lax.rsqrt(mean(x32 * x32) + epsilon)
    scale = scale.astype(jnp.float32) + offset if offset else scale.astype(jnp.float32)
    x32 = x32 * jnp.expand_dims(scale, range(x.ndim - scale.ndim))
    if isinstance(norm, CentredNorm) and norm.bias is not None:
        x32 = x32 + jnp.expand_dims(norm.bias.astype(jnp.float32), range(x.ndim - scale.ndim))
    return x32.astype(x.dtype)


def without_centred(x: Array, norm: AnyNorm | None) -> tuple[Array, Norm | None]:
    """Return x after its norm if that is centred, and the norm that is left, which kernels take with their product."""
    return (rms_norm(x, norm), None) if isinstance(norm, CentredNorm) else (x, norm)


def lookup(table: Array | Quantized, index: Array) -> Array:
    """Return rows [..., D] of a table [V, D], an embedding, at the places `index` [...]."""
    return rows(table, index) if isinstance(table, Quantized) else table[index]


def outputs_from(weight: Array | Quantized, first: int, *, transposed: bool) -> Array | Quantized:
    """Return a weight, as `linear` takes it, without its first outputs."""
    return weight[first:] if transposed or isinstance(weight, Quantized) else weight[:, first:]


def linear(
    x: Array,
    weight: Array | Quantized,
    *,
    transposed: bool = False,
    norm: AnyNorm | tuple[Array, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """Multiply x [B, T, D] by a weight, with the norm before and the gate or the sum after the product.

    Kernels take a transposed or a quantised weight and one token, or a few tokens of 16 bits.

    Args:
        x: [B, T, D] floats.
        weight: [D, N], or [N, D] if `transposed`. A `Quantized` weight is always [N, D].
        transposed: whether a weight of floats is [N, D].
        norm: scale [D], epsilon and offset of a root-mean-square norm of x, which comes first; None for none. A
            `CentredNorm` is computed before the product.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [B, T, N], or [B, T, N / 2] with an activation, or what broadcasts to it: added at the end.
        dtype: of the result; None is the dtype of x.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they are faster.

    Returns:
        [B, T, N], or [B, T, N / 2] with an activation.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
    """
    x, before = without_centred(x, None if norm is None else Norm.of(norm))
    if isinstance(weight, Quantized):
        transposed = True
        if weight.order is not None:
            # The inputs are put in the order of the codes, and so is the scale of their norm.
            order, weight = weight.order, weight.replace(order=None)
            x, before = x[..., order], None if before is None else before._replace(scale=before.scale[order])
    numbers = None if before is None else (before.epsilon, before.offset)
    static = {"norm": numbers, "activation": activation, "dtype": dtype or x.dtype}
    kernel_of = partial(_kernel_of, interpret=implementation == "interpret")

    def reason(x: Array, weight: Array | Quantized, scale: Array | None, residual: Array | None) -> str | None:
        if not transposed:
            return "the kernels take a transposed weight [N, D], got transposed=False"
        return kernel_of(x, weight).unsupported(x, weight)

    def is_worthwhile(x: Array, weight: Array | Quantized, scale: Array | None, residual: Array | None) -> bool:
        return kernel_of(x, weight).is_worthwhile(x, weight)

    return dispatch(
        (x, weight, None if before is None else before.scale, residual),
        xla=partial(_by_xla, transposed=transposed, **static),
        pallas=partial(_by_kernel, **static),
        reason=reason,
        is_worthwhile=is_worthwhile,
        implementation=implementation,
    )


def linear_of_two(
    x: Array,
    weight: Array | Quantized,
    small: Array | Quantized,
    *,
    transposed: bool = False,
    norm: AnyNorm | tuple[Array, float] | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Multiply x [B, T, D] by a weight and by a small matrix, after one norm.

    A kernel norms from 2 to 8 rows of 16 bits where it multiplies them by the small matrix, and the product with the
    weight reads them from it. Other rows are normed by each of the two products, as `linear` does it.

    Args:
        x: [B, T, D] floats.
        weight: as `linear` takes it.
        small: a second matrix, of some hundred outputs at most, as `linear` takes it.
        transposed: whether matrices of floats are [N, D].
        norm: scale [D], epsilon and offset of a root-mean-square norm of x, which comes first; None for none.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they are faster.

    Returns:
        The products [B, T, N] with the weight, and [B, T, M] with the small matrix.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
    """
    x, before = without_centred(x, None if norm is None else Norm.of(norm))
    product = partial(linear, transposed=transposed, implementation=implementation)

    def by_xla(x: Array, small: Array, scale: Array | None) -> tuple[Array, Array]:
        own = with_scale(before, scale)
        rows = x if own is None else rms_norm(x, own)
        return rows, _by_xla(rows, small, None, None, transposed=True, norm=None, activation=None, dtype=x.dtype)

    def by_kernel(x: Array, small: Array, scale: Array | None, *, interpret: bool) -> tuple[Array, Array]:
        own, flat = with_scale(before, scale), x.reshape(-1, x.shape[2])
        y, _, rows = one_row.linear_after_norm(flat, small, own, dtype=x.dtype, interpret=interpret)
        return rows.reshape(x.shape), y.reshape(*x.shape[:2], -1)

    if not transposed or not _are_normed_together(x, small):
        return product(x, weight, norm=before), product(x, small, norm=before)
    rows, of_small = dispatch(
        (x, small, None if before is None else before.scale),
        xla=by_xla,
        pallas=by_kernel,
        reason=lambda x, small, scale: one_row.unsupported(x[0, 0], small),
        implementation=implementation,
    )
    return product(rows, weight), of_small


def _are_normed_together(x: Array, small: Array | Quantized) -> bool:
    """Return whether one kernel norms rows and multiplies them by a small matrix.

    The rows that it returns would differ from device to device, as far as JAX knows, where the matrix does.
    """
    if isinstance(small, Quantized) or not has_static_shape(x) or not 2 <= x.shape[0] * x.shape[1] <= NORMED_ROWS:
        return False
    if x.dtype == jnp.float32 or one_row.unsupported(x[0, 0], small) is not None:
        return False
    axes = [jax.typeof(one).manual_axis_type.varying for one in (x, small)]
    return axes[1] <= axes[0]


def _by_xla(x: Array, weight: Array | Quantized, scale: Array | None, residual: Array | None, **static) -> Array:
    operands, product = (x, weight, scale, residual), partial(_product, **static)
    if not has_static_shape(x) or x.shape[:2] != (1, 1) or is_partitioned((x, weight)):
        return product(*operands)

    def as_pair(x: Array, *others: Array | None) -> Array:
        return product(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), *others)[:, :1]

    # On a GPU, XLA multiplies two rows by a matrix faster than one.
    return jax.lax.platform_dependent(*operands, cuda=as_pair, default=product)


def _product(
    x: Array,
    weight: Array | Quantized,
    scale: Array | None,
    residual: Array | None,
    *,
    transposed,
    norm,
    activation,
    dtype,
) -> Array:
    if scale is not None:
        x = rms_norm(x, Norm(scale, *norm))
    if isinstance(weight, Quantized):
        weight = dequantize(weight, x.dtype)
    if _suits_chunks(x, weight) and jax.default_backend() == "cpu":
        y = (
            _in_chunks(x.reshape(-1, x.shape[-1]), weight, transposed=transposed)
            .reshape(*x.shape[:2], -1)
            .astype(dtype)
        )
    else:
        y = jnp.einsum("btd,nd->btn" if transposed else "btd,dn->btn", x, weight, preferred_element_type=dtype)
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=-1)
        y = activation(gate) * up
    return y if residual is None else residual + y


def _suits_chunks(x: Array, weight: Array) -> bool:
    """Return whether `_in_chunks` may multiply these: a few rows of float32 and a matrix that no device shares."""
    if not has_static_shape((x, weight)) or is_partitioned((x, weight)):
        return False
    return x.dtype == weight.dtype == jnp.float32 and 1 <= x.size // x.shape[-1] <= FEW_ROWS


def _in_chunks(x: Array, weight: Array, *, transposed: bool) -> Array:
    """Multiply a few rows x [R, D] by a weight, as CPUs read it fastest.

    XLA's product of a few rows goes down strips of 64 columns, each number of a strip in another page of memory. In
    chunks of 16 inputs it reads 16 rows of the weight from end to end. A product of one row with few outputs keeps a
    single core busy, and chunks of 64 inputs several. A transposed weight is read from end to end where it comes first.
    """
    num_rows, inputs = x.shape
    if transposed:
        if num_rows == 1 or weight.size < 1 << 22:
            return jnp.einsum("rd,nd->rn", x, weight)
        # The barrier keeps XLA from exchanging the two again.
        return jax.lax.optimization_barrier(jnp.einsum("nd,rd->nr", weight, x)).T
    chunk = 64 if num_rows == 1 else 16
    is_large = weight.size >= (1 << 18 if num_rows == 1 else 3 << 18)
    if inputs % chunk or not is_large or num_rows * weight.size > 1 << 25:  # the sums of the chunks must fit a cache
        return jnp.einsum("rd,dn->rn", x, weight)
    x, weight = x.reshape(num_rows, -1, chunk), weight.reshape(-1, chunk, weight.shape[1])
    return jnp.einsum("rkc,kcn->krn", x, weight).sum(axis=0)


def _kernel_of(x: Array, weight: Array | Quantized, *, interpret: bool) -> ModuleType:
    """The kernel for these: a faster one than XLA, else one that can multiply them, else one that says why not."""
    kernels = (one_row, few_rows)
    if isinstance(weight, Quantized):  # the kernel for tiles cannot be interpreted
        kernels = (quantized_row, quantized_rows) if interpret else (quantized_row, quantized_tiles, quantized_rows)
    able = [kernel for kernel in kernels if kernel.unsupported(x, weight) is None]
    faster = [kernel for kernel in able if kernel.is_worthwhile(x, weight)]
    return (faster or able or [kernels[0] if x.size == x.shape[-1] else kernels[-1]])[0]


def _by_kernel(
    x: Array,
    weight: Array | Quantized,
    scale: Array | None,
    residual: Array | None,
    *,
    norm: tuple[float, float] | None,
    interpret: bool,
    **static,
) -> Array:
    static["interpret"] = interpret
    before = None if scale is None or norm is None else Norm(scale, *norm)
    kernel = _kernel_of(x, weight, interpret=interpret)
    if kernel in (one_row, quantized_row):
        residual = None if residual is None else residual.ravel()
        return kernel.linear(x.ravel(), weight, norm=before, residual=residual, **static)[None, None]
    if kernel is quantized_tiles:
        del static["interpret"]
    if kernel in (quantized_tiles, quantized_rows):
        static["norm"] = before
    elif before is not None:
        x = rms_norm(x, before)
    flat = x.reshape(-1, x.shape[2])
    if residual is not None:
        residual = jnp.broadcast_to(residual, (*x.shape[:2], residual.shape[2])).reshape(flat.shape[0], -1)
    return kernel.matmul(flat, weight, residual=residual, **static).reshape(*x.shape[:2], -1)
