"""FP8: `weight` of e4m3 with `weight_scale_inv` for blocks, or with `weight_scale` for the whole or each output.

A stack of experts has its own name, and its scales have the ending `_scale_inv`. FBGEMM, with which Llama 3.1 405B was
rounded, has scales of outputs, in a stack with the ending `_scale`.
"""

from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import FLOATS, OF_ATTENTION, StoredLinear, shape_in
from specjax.models.quantized import Quantized, pack

FORMATS = "e4m3", "float8_e4m3fn"  # names of one format; MiniMax-M2 has the longer one
E8M0 = "float8_e8m0fnu"  # powers of two, where scale_fmt is "ue8m0"
MX_BLOCK = 32  # codes of MXFP8 that share an exponent


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") in ("fp8", "fbgemm_fp8")


@dataclass(frozen=True)
class FP8:
    """How the files of a checkpoint store matrices of e4m3."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None is all
    unneeded: tuple[str, ...] = OF_ATTENTION  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "FP8":
        """Read the table quantization_config.

        Raises:
            ValueError: a field has a wrong value, or is not supported.
        """
        config.choice("fmt", FORMATS, FORMATS[0])
        for name in ("modules_to_not_convert", "ignored_layers"):
            config.get(name, list, [])
        return cls(block_of(config, "weight_block_size"))

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the matrix, or the stack of this name, is of e4m3."""
        return linear.has(".weight", "float8_e4m3fn") or linear.has("", "float8_e4m3fn")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear, ".weight" if linear.has(".weight") else "")

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix: W = code * scale, for which the files say `weight_scale_inv` or `weight_scale`.

        A stack of matrices is read where the shape of `linear` has more axes.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        if len(linear.shape) > 2:
            return _read_stack(linear, self.block)
        ending = ".weight_scale_inv" if self.block or linear.has(".weight_scale_inv") else ".weight_scale"
        return read_e4m3(linear, ending, self.block)


def block_of(config: ConfigFile, name: str) -> tuple[int, int] | None:
    """Return the field with the outputs and inputs of a block, None without the field.

    Raises:
        ValueError: the field is no list of two sizes.
    """
    block = config.get(name, list, None)
    if block is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"{config.where(name)} must be two sizes, outputs and inputs of a block, got {block!r}")
    return block[0], block[1]


def read_e4m3(linear: StoredLinear, ending: str, block: tuple[int, int] | None) -> Quantized:
    """Read a matrix of e4m3.

    Args:
        linear: the matrix.
        ending: of the name of the scales. They are of blocks, or a single number, or [N] or [N, 1].
        block: outputs and inputs of a block, None: scales are of whole outputs.

    Raises:
        ValueError: an array is missing, or has a wrong shape, dtype or value.
    """
    codes = linear.array(".weight", linear.shape, "float8_e4m3fn")
    scale = scale_of_outputs(linear, ending) if block is None else _scale_of_blocks(linear, ending, block)
    return pack(codes, scale, bits=8, code="e4m3", group=block, dtype=linear.dtype)


def _read_stack(linear: StoredLinear, block: tuple[int, int] | None) -> Quantized:
    """Read a stack [E, N, K] of e4m3, with scales of blocks, or one of each matrix, or one of each half of a matrix.

    FBGEMM has one of each output.
    """
    if linear.has("_scale"):
        codes = linear.of_stack("", linear.shape, "float8_e4m3fn")
        return pack(codes, linear.scales_of_stack("_scale"), bits=8, code="e4m3", dtype=linear.dtype)
    codes = linear.array("", linear.shape, "float8_e4m3fn")
    if block is not None:
        scale = _scale_of_blocks(linear, "_scale_inv", block)
        return pack(codes, scale, bits=8, code="e4m3", group=block, dtype=linear.dtype)
    number, outputs, _ = linear.shape
    shapes = (number,), (number, 1, 1), (number, 2, 1)  # gate and up, which are one matrix, may have a scale each
    stored = linear.entry("_scale_inv").shape
    scale = linear.array("_scale_inv", stored if stored in shapes else shapes[1], *FLOATS).reshape(number, -1, 1)
    scale = np.repeat(scale, outputs // scale.shape[1], axis=1)
    return pack(codes, scale, bits=8, code="e4m3", dtype=linear.dtype)


def _scale_of_blocks(linear: StoredLinear, ending: str, block: tuple[int, int]) -> np.ndarray:
    """Read scales of blocks of a matrix or of a stack."""
    *number, outputs, inputs = linear.shape
    scale = linear.array(ending, (*number, -(-outputs // block[0]), -(-inputs // block[1])), *FLOATS, E8M0)
    return scale.astype(np.float32) if scale.dtype.name == E8M0 else scale


def read_mxfp8(linear: StoredLinear) -> Quantized:
    """Read a matrix of e4m3 whose `weight_scale` [N, K / 32] are exponents: s stands for 2 ** (s - 127).

    Raises:
        ValueError: an array is missing, or has a wrong shape, dtype or value.
    """
    outputs, inputs = linear.shape
    codes = linear.array(".weight", linear.shape, "float8_e4m3fn")
    scale = linear.array(".weight_scale", (outputs, -(-inputs // MX_BLOCK)), "uint8", E8M0).view(np.uint8)
    return pack(codes, scale, bits=8, code="e4m3", group=MX_BLOCK, dtype=linear.dtype)


def scale_of_outputs(linear: StoredLinear, ending: str):
    """Read scales [N, 1], which the file may hold as [N] or as one number.

    Raises:
        ValueError: the array is missing, or has another shape or dtype.
    """
    outputs = linear.shape[0]
    entry = linear.find(linear.name + ending)
    if entry is not None and entry.shape == (outputs,) and outputs > 1:
        return linear.array(ending, None, *FLOATS)[:, None]
    return linear.scale(ending, (outputs, 1), *FLOATS)
