"""Turn blocks of GGUF into matrices: codes with scales where a `Quantized` can stand for them, and floats."""

from typing import Any

import ml_dtypes
import numpy as np

from specjax.models.quantization import nvfp4
from specjax.models.quantized import Quantized, dequantize, pack
from specjax.validation.extras import needs

GROUP = 32  # codes that share a scale
KEPT = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "MXFP4", "NVFP4")  # types of which matrices stay in codes
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def matrix_of(rows: np.ndarray, kind: str, dtype: np.dtype, scale_of_matrix: float | None = None) -> Quantized:
    """Return the matrix [N, K] that bytes [N, B] of a type in KEPT hold.

    Args:
        rows: uint8.
        kind: name of the type.
        dtype: of the floats for which the matrix stands.
        scale_of_matrix: factor on all scales, which NVFP4 may have; None is none.

    Raises:
        ValueError: a scale is infinite or NaN.
    """
    if kind == "NVFP4":
        whole = np.float32(1 if scale_of_matrix is None else scale_of_matrix)
        return _of_nvfp4(rows.reshape(len(rows), -1, 36), whole, dtype)
    if kind == "Q8_0":
        blocks = rows.reshape(len(rows), -1, 34)
        codes, scale = blocks[..., 2:].view(np.int8), _halves(blocks, 0)
        return _packed(codes, scale, None, bits=8, dtype=dtype)
    if kind == "MXFP4":
        blocks = rows.reshape(len(rows), -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1).reshape(len(rows), -1)
        return pack(codes, blocks[..., 0], bits=4, code="e2m1", group=GROUP, dtype=dtype)
    if kind == "Q4_K":
        return _of_superblocks(rows.reshape(len(rows), -1, 144), dtype)
    start = 2 if kind == "Q4_0" else 4
    blocks = rows.reshape(len(rows), -1, start + 16)
    codes = np.concatenate([blocks[..., start:] & 15, blocks[..., start:] >> 4], axis=-1)
    minimum = _halves(blocks, 2) if kind == "Q4_1" else None
    return _packed(codes, _halves(blocks, 0), minimum, bits=4, dtype=dtype)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at a place of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _packed(
    codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None, *, bits: int, dtype: np.dtype
) -> Quantized:
    """Return the matrix of codes [N, blocks, 32] and scales [N, blocks]; a scale of 0 leaves the minimum or 0."""
    middle = 8 if bits == 4 and minimum is None else 0
    if (is_zero := scale == 0).any():
        codes = np.where(is_zero[..., None], codes.dtype.type(middle), codes)
        scale = np.where(is_zero, scale.dtype.type(1), scale)
    return pack(codes.reshape(len(codes), -1), scale, bits=bits, group=GROUP, minimum=minimum, dtype=dtype)


def _of_superblocks(blocks: np.ndarray, dtype: np.dtype) -> Quantized:
    """Return the matrix of blocks of 256 codes, of which each 32 have a scale and a minimum of 6 bits."""
    scale, minimum = (_halves(blocks, start).astype(np.float32)[..., None] for start in (0, 2))
    low, high, both = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    of_scale = np.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], axis=-1)
    of_minimum = np.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], axis=-1)
    halves = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([halves & 15, halves >> 4], axis=-2).reshape(len(blocks), -1, GROUP)
    shape = len(blocks), -1
    scale, minimum = (scale * of_scale).reshape(shape), -(minimum * of_minimum).reshape(shape)
    return _packed(codes, scale, minimum, bits=4, dtype=dtype)


def _of_nvfp4(blocks: np.ndarray, whole: np.float32, dtype: np.dtype) -> Quantized:
    """Return the matrix of blocks of 64 codes of e2m1, of which each 16 have a scale of e4m3 without a sign."""
    scale = (blocks[..., :4] & np.uint8(127)).view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(len(blocks), -1)
    halves = blocks[..., 4:].reshape(len(blocks), -1, 8)
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(len(blocks), -1)
    return nvfp4.of_codes(codes, scale * whole, dtype)


def floats_of(rows: np.ndarray, kind: str, scale_of_matrix: float | None = None) -> np.ndarray:
    """Return the numbers [N, K] of bytes [N, B]: in their dtype for floats, else float32.

    `scale_of_matrix` is as in `matrix_of`.

    Raises:
        ModuleNotFoundError: the type needs the package gguf, which is not installed.
        ValueError: a scale is infinite or NaN.
    """
    if kind in FLOATS:
        return np.ascontiguousarray(rows).view(FLOATS[kind])
    if kind in KEPT:
        return np.asarray(dequantize(matrix_of(np.asarray(rows), kind, np.dtype(np.float32), scale_of_matrix)))
    with needs("gguf"):
        import gguf  # pyright: ignore[reportMissingImports]
    kinds: Any = gguf.GGMLQuantizationType  # pyright: ignore[reportAttributeAccessIssue]
    return gguf.dequantize(np.asarray(rows), kinds[kind])  # pyright: ignore[reportAttributeAccessIssue]
