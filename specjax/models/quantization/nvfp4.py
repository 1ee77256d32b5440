"""Codes of e2m1 in bytes with scales of e4m3 for 16 of them, and one scale of the matrix, as two tools write them."""

import numpy as np

from specjax.models.quantization.linear_files import StoredLinear, unpack_bytes
from specjax.models.quantized import Quantized, pack

BLOCK = 16  # codes that share a scale


def read_nvfp4(linear: StoredLinear, codes_ending: str, scale_of_matrix: np.float32, *, divides: bool) -> Quantized:
    """Read a matrix W = code * scale of its group * scale of the matrix.

    Args:
        linear: the matrix.
        codes_ending: of the name of the codes, u8 [N, K / 2]; the scales of groups are `.weight_scale`.
        scale_of_matrix: float32.
        divides: whether the scales of groups are divided by the scale of the matrix, and not multiplied.

    Raises:
        ValueError: an array is missing, or has a wrong shape, dtype or value.
    """
    outputs, inputs = linear.shape
    codes = unpack_bytes(linear.array(codes_ending, (outputs, -(-inputs // 2)), "uint8"))[:, :inputs]
    scale = linear.array(".weight_scale", (outputs, -(-inputs // BLOCK)), "float8_e4m3fn").astype(np.float32)
    return of_codes(codes, scale / scale_of_matrix if divides else scale * scale_of_matrix, linear.dtype)


def read_stack(linear: StoredLinear) -> Quantized:
    """Read a stack [E, N, K] of matrices W = code * `_weight_scale` of its group * `_weight_scale_2`.

    Raises:
        ValueError: an array is missing, or has a wrong shape, dtype or value.
    """
    number, outputs, inputs = linear.shape
    codes = unpack_bytes(linear.of_stack("", (number, outputs, -(-inputs // 2)), "uint8"))[..., :inputs]
    scale = linear.of_stack("_weight_scale", (number, outputs, -(-inputs // BLOCK)), "float8_e4m3fn")
    return of_codes(codes, scale.astype(np.float32) * linear.scales_of_stack("_weight_scale_2"), linear.dtype)


def of_codes(codes: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> Quantized:
    """Return matrices of codes [..., N, K] with scales [..., N, K / 16], of which some may be zero."""
    is_zero = np.repeat(scale == 0, BLOCK, axis=-1)[..., : codes.shape[-1]]  # of groups too small for a scale of e4m3
    codes = np.where(is_zero, codes & np.uint8(8), codes)  # the sign of the zero stays
    return pack(codes, np.where(scale == 0, np.float32(1), scale), bits=4, code="e2m1", group=BLOCK, dtype=dtype)


def scalar(linear: StoredLinear, ending: str) -> np.float32:
    """Read the scale of the matrix, a positive number.

    Raises:
        ValueError: the array is missing, or is no positive number.
    """
    values = linear.array(ending, None, "float32").ravel()
    if values.size != 1 or not (np.isfinite(values[0]) and values[0] > 0):
        raise ValueError(f"tensor {linear.name}{ending} must be one positive number, got {values[:4]}")
    return values[0]
