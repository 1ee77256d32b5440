"""torchao in safetensors: `_weight_qdata` of e4m3 or int8 with `_weight_scale`, and `_weight_zero_point` for int8.

Codes have the shape of the matrix, and the shape of the scales tells how many numbers share one.
"""

from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import FLOATS, StoredLinear, shape_in
from specjax.models.quantized import Quantized, pack

CODES = "._weight_qdata"


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "torchao"


@dataclass(frozen=True)
class TorchAO:
    """How the files of a checkpoint store matrices of e4m3 or int8."""

    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "TorchAO":
        """Read the table quantization_config, of which no field is needed: the arrays tell what they are."""
        config.get("modules_to_not_convert", list, [])
        return cls()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the files have the codes of a matrix."""
        return linear.has(CODES)

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear, CODES)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        codes = linear.array(CODES, linear.shape, "float8_e4m3fn", "int8")
        group, shape = _group(linear)
        scale = linear.array("._weight_scale", None, *FLOATS).reshape(shape)
        is_int = codes.dtype == np.int8
        zero = None
        if is_int and linear.has("._weight_zero_point"):
            zero = linear.array("._weight_zero_point", None, "int8", "int32", "int64", *FLOATS)
            if zero.size != scale.size:
                place = linear.entry("._weight_zero_point").place
                raise ValueError(f"{place} must have as many numbers as its scales, {scale.size}, got {zero.size}")
            zero = zero.reshape(shape)
            zero = zero.astype(np.int32) if zero.dtype.kind == "i" else zero
        return pack(codes, scale, bits=8, code="int" if is_int else "e4m3", group=group, zero=zero, dtype=linear.dtype)


def _group(linear: StoredLinear) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many outputs and inputs share a scale, and how many scales there are for them.

    Raises:
        ValueError: the scales have another shape than parts of the matrix.
    """
    entry, (outputs, inputs) = linear.entry("._weight_scale"), linear.shape
    stored = entry.shape
    rows, columns = {0: (1, 1), 1: (*stored, 1), 2: stored}.get(len(stored), (0, 0))
    if not (rows and columns) or outputs % rows or inputs % columns:
        raise ValueError(f"{entry.place} must have a scale for each part of a matrix {linear.shape}, got {stored}")
    return (outputs // rows, inputs // columns), (rows, columns)
