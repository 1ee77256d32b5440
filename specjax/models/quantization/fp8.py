"""FP8: `weight` of e4m3 with `weight_scale_inv` for blocks, or with `weight_scale` for the whole or each output."""

from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import FLOATS, StoredLinear, shape_in
from specjax.models.quantized import Quantized, pack

FORMATS = "e4m3", "float8_e4m3fn"  # names of one format; MiniMax-M2 has the longer one
E8M0 = "float8_e8m0fnu"  # powers of two, where scale_fmt is "ue8m0"
MX_BLOCK = 32  # codes of MXFP8 that share an exponent


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "fp8"


@dataclass(frozen=True)
class FP8:
    """How the files of a checkpoint store matrices of e4m3."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None is all
    unneeded: tuple[str, ...] = ("*.k_scale", "*.v_scale", "*.q_scale", "*.output_scale")  # `cache_dtype` reads some

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
        """Return whether the matrix is of e4m3."""
        return linear.has(".weight", "float8_e4m3fn")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix: W = code * scale, for which the files say `weight_scale_inv` or `weight_scale`.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
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
    outputs, inputs = linear.shape
    codes = linear.array(".weight", linear.shape, "float8_e4m3fn")
    if block is not None:
        shape = -(-outputs // block[0]), -(-inputs // block[1])
        scale = linear.array(ending, shape, *FLOATS, E8M0)
        scale = scale.astype(np.float32) if scale.dtype.name == E8M0 else scale
        return pack(codes, scale, bits=8, code="e4m3", group=block, dtype=linear.dtype)
    scale = scale_of_outputs(linear, ending)
    return pack(codes, scale, bits=8, code="e4m3", dtype=linear.dtype)


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
