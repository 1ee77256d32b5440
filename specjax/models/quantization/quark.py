"""Quark: FP8 with scales of matrices or outputs, and MXFP4. The dtype of codes tells which of them a matrix has.

Source: AMD's Quark, whose table quantization_config says how all matrices are rounded, and some by patterns of names.
"""

from dataclasses import dataclass

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.fp8 import read_e4m3
from specjax.models.quantization.linear_files import OF_ATTENTION, StoredLinear, shape_in
from specjax.models.quantization.mxfp4 import BLOCK, read_mxfp4
from specjax.models.quantized import Quantized

SCHEMES = {"fp8_e4m3": ("per_tensor", "per_channel"), "fp4": ("per_group",)}  # which numbers share a scale, by dtype
TABLES = "layer_quant_config", "layer_type_quant_config"  # of matrices unlike the others, by patterns and by class
ROTATIONS = "rotation", "quarot"  # algorithms that may turn activations, too


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "quark"


@dataclass(frozen=True)
class Quark:
    """How the files of a checkpoint store matrices of e4m3 or e2m1."""

    unneeded: tuple[str, ...] = OF_ATTENTION  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "Quark":
        """Read the table quantization_config.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        _check(config.table("global_quant_config"))
        for name in TABLES:
            tables = config.table(name)
            for pattern in tables.fields:
                _check(tables.table(pattern))
        export = config.table("export")
        export.choice("weight_format", ("real_quantized",), default="real_quantized")
        found = config.fields.get("algo_config") or []
        for algorithm in found if isinstance(found, list) else [found]:
            if isinstance(algorithm, dict) and algorithm.get("name") in ROTATIONS:
                raise config.refused("algo_config")
        config.get("exclude", list, [])
        return cls()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the matrix is of e4m3, or of codes in bytes."""
        return linear.has(".weight", "float8_e4m3fn", "uint8")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear, codes=2 if linear.has(".weight", "uint8") else 1)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        if linear.has(".weight", "uint8"):
            return read_mxfp4(linear, ".weight")
        return read_e4m3(linear, ".weight_scale", None)


def _check(table: ConfigFile) -> None:
    """Raise ValueError unless the weights of some matrices are stored in a way that is read, or as floats."""
    if isinstance(table.fields.get("weight"), list):
        raise table.refused("weight")  # rounded twice
    weight = table.table("weight")
    if not weight.fields:
        return
    dtype = weight.choice("dtype", tuple(SCHEMES))
    scheme = weight.choice("qscheme", SCHEMES[dtype])
    weight.only("is_dynamic", False)
    if scheme == "per_group":
        weight.only("group_size", BLOCK)
        weight.choice("scale_format", ("e8m0",), default="e8m0")
    elif scheme == "per_channel":
        weight.only("ch_axis", 0)
