"""ModelOpt: FP8 with scales of matrices or outputs, MXFP8 and NVFP4, by quantization_config or hf_quant_config.json.

Matrices of one checkpoint may have any, which the dtypes of codes and scales tell: names in the config are not needed.
A stack of experts has its own name, and the endings of its scales begin with a line and not with a point.
"""

from dataclasses import dataclass

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.fp8 import E8M0, read_e4m3, read_mxfp8
from specjax.models.quantization.linear_files import StoredLinear, shape_in
from specjax.models.quantization.nvfp4 import BLOCK, read_nvfp4, read_stack, scalar
from specjax.models.quantized import Quantized, pack

# Some also say how engines round activations.
ALGORITHMS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4"


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config, or hf_quant_config.json, names this format."""
    return config.fields.get("quant_method") == "modelopt" or isinstance(config.fields.get("quantization"), dict)


@dataclass(frozen=True)
class ModelOpt:
    """How the files of a checkpoint store matrices of e4m3 or e2m1."""

    unneeded: tuple[str, ...] = ("*.k_scale", "*.v_scale")  # as `Scheme` has them: `cache_dtype` reads them

    @classmethod
    def of(cls, config: ConfigFile) -> "ModelOpt":
        """Read the table quantization_config, or the table quantization of hf_quant_config.json.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        table = config.table("quantization") if "quantization" in config else config
        has_cache_alone = table.fields.get("kv_cache_quant_algo") and table.fields.get("quant_algo") is None
        algorithm = None if has_cache_alone else table.choice("quant_algo", (*ALGORITHMS, "MIXED_PRECISION"))
        layers = table.get("quantized_layers", dict, {}) if algorithm == "MIXED_PRECISION" else {}
        for name, fields in layers.items():
            if not isinstance(fields, dict) or fields.get("quant_algo") not in (*ALGORITHMS, "UNQUANTIZED"):
                expected = f"{table.where('quantized_layers')} must name algorithms of {', '.join(ALGORITHMS)}"
                raise ValueError(f"{expected}, got {fields!r} for {name}")
        for fields in (table.fields, *layers.values()):
            if "NVFP4" in str(fields.get("quant_algo")) and fields.get("group_size") not in (None, BLOCK):
                raise ValueError(f"{table.where('group_size')} must be {BLOCK} for NVFP4, got {fields['group_size']}")
        table.ignore("group_size")
        for name in ("exclude_modules", "ignore"):
            table.get(name, list, [])
        return cls()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the matrix, or the stack of this name, is of e4m3, or of codes in bytes."""
        return any(linear.has(ending, "float8_e4m3fn", "uint8") for ending in (".weight", ""))

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        ending = ".weight" if linear.has(".weight") else ""
        return shape_in(linear, ending, 2 if linear.has(ending, "uint8") else 1)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix, or a stack of matrices where the shape of `linear` has more axes.

        Raises:
            ValueError: an array is missing, has a wrong shape, dtype or value, or is not supported.
        """
        if len(linear.shape) > 2:
            return _read_stack(linear)
        if linear.has(".pre_quant_scale"):
            raise ValueError(f"tensor {linear.name}.pre_quant_scale must be absent, specjax does not scale activations")
        if linear.has(".weight", "uint8"):
            return read_nvfp4(linear, ".weight", scalar(linear, ".weight_scale_2"), divides=False)
        if linear.has(".weight_scale", "uint8", E8M0):
            return read_mxfp8(linear)
        return read_e4m3(linear, ".weight_scale", None)


def _read_stack(linear: StoredLinear) -> Quantized:
    """Read a stack [E, N, K] of NVFP4, or of e4m3 with one scale, one of each matrix or one of each output."""
    if linear.has("_pre_quant_scale"):
        raise ValueError(f"tensor {linear.name}_pre_quant_scale must be absent, specjax does not scale activations")
    if linear.has("", "uint8"):
        return read_stack(linear)
    codes = linear.of_stack("", linear.shape, "float8_e4m3fn")
    return pack(codes, linear.scales_of_stack("_weight_scale"), bits=8, code="e4m3", dtype=linear.dtype)
