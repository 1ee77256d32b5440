"""ModelOpt: FP8 with scales of matrices or outputs, MXFP8 and NVFP4, by quantization_config or hf_quant_config.json.

Matrices of one checkpoint may have any, which the dtypes of codes and scales tell: names in the config are not needed.
"""

from dataclasses import dataclass

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.fp8 import E8M0, read_e4m3, read_mxfp8
from specjax.models.quantization.linear_files import StoredLinear, shape_in
from specjax.models.quantization.nvfp4 import BLOCK, read_nvfp4, scalar
from specjax.models.quantized import Quantized

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
        """Return whether the matrix is of e4m3, or of codes in bytes."""
        return linear.has(".weight", "float8_e4m3fn", "uint8")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear, codes=2 if linear.has(".weight", "uint8") else 1)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, has a wrong shape, dtype or value, or is not supported.
        """
        if linear.has(".pre_quant_scale"):
            raise ValueError(f"tensor {linear.name}.pre_quant_scale must be absent, specjax does not scale activations")
        if linear.has(".weight", "uint8"):
            return read_nvfp4(linear, ".weight", scalar(linear, ".weight_scale_2"), divides=False)
        if linear.has(".weight_scale", "uint8", E8M0):
            return read_mxfp8(linear)
        return read_e4m3(linear, ".weight_scale", None)
