"""Products with the matrices of a network, together with the norm, the gate or the sum that stands beside them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import linear as one_row
from pallas_kernels import matmul as few_rows
from pallas_kernels.rows import is_partitioned
from specjax.types import Array

Norm = tuple[Array, float]  # scale [D], epsilon


def rms_norm(x: Array, norm: Norm) -> Array:
    """Scale x [B, T, ..., D] to unit root mean square over its last axis, in float32, then by the norm's scale."""
    scale, epsilon = norm
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def linear(
    x: Array,
    weight: Array,
    *,
    transposed: bool = False,
    norm: Norm | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """x [B, T, D] times weight [D, N].

    On an NVIDIA GPU one token, or a few and a large weight, take a kernel where the weight is transposed, not sharded.

    Args:
        transposed: the weight is [N, D].
        norm: is taken of x first.
        activation: the first half of the products goes through it and is multiplied by the second.
        residual: [B, T, N], or with an activation [B, T, N / 2], or what broadcasts to it: added at the end.
        dtype: of the result; None is that of x.

    Returns:
        [B, T, N], or with an activation [B, T, N / 2].
    """
    dtype = dtype or x.dtype

    def product(x, weight, scale, residual):
        if norm is not None:
            x = rms_norm(x, (scale, norm[1]))
        y = jnp.einsum("btd,nd->btn" if transposed else "btd,dn->btn", x, weight, preferred_element_type=dtype)
        if activation is not None:
            gate, up = jnp.split(y, 2, axis=-1)
            y = activation(gate) * up
        return y if residual is None else residual + y

    def pair(x, weight, scale, residual):
        return product(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), weight, scale, residual)[:, :1]

    def one_row_kernel(x, weight, scale, residual):
        y = one_row.linear(
            x.ravel(),
            weight,
            norm=None if norm is None else (scale, norm[1]),
            activation=activation,
            residual=None if residual is None else residual.ravel(),
            dtype=dtype,
        )
        return y[None, None]

    def few_rows_kernel(x, weight, scale, residual):
        if norm is not None:
            x = rms_norm(x, (scale, norm[1]))
        rows = x.reshape(-1, x.shape[2])
        if residual is not None:
            residual = jnp.broadcast_to(residual, (*x.shape[:2], residual.shape[2])).reshape(rows.shape[0], -1)
        y = few_rows.matmul(rows, weight, activation=activation, residual=residual, dtype=dtype)
        return y.reshape(*x.shape[:2], -1)

    operands = x, weight, None if norm is None else norm[0], residual
    if is_partitioned(x, weight):
        return product(*operands)
    if transposed and one_row.is_supported(x, weight):
        cuda = one_row_kernel
    elif transposed and few_rows.is_supported(x, weight):
        cuda = few_rows_kernel
    elif x.shape[:2] == (1, 1):
        cuda = pair  # XLA multiplies two rows by a matrix faster than one
    else:
        return product(*operands)
    return jax.lax.platform_dependent(*operands, cuda=cuda, default=product)
