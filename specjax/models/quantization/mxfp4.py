"""MXFP4: codes of e2m1 in bytes, with exponents of 32 of them.

gpt-oss has `_blocks` of 16 bytes and `_scales`; other tools have a row of bytes for each output, and `weight_scale`.
"""

from dataclasses import dataclass

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import StoredLinear, num_groups, unpack_bytes
from specjax.models.quantized import Quantized, pack

BLOCK = 32  # codes that share an exponent


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "mxfp4"


@dataclass(frozen=True)
class MXFP4:
    """How the files of a checkpoint store matrices of e2m1, or stacks of such matrices."""

    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "MXFP4":
        """Read the table quantization_config.

        Raises:
            ValueError: a field has a wrong value.
        """
        config.get("modules_to_not_convert", list, [])
        return cls()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the files have the codes of a matrix."""
        return linear.has("_blocks")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        *outer, blocks, _ = linear.entry("_blocks").shape
        return *outer, blocks * BLOCK

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix [N, K], or a stack of matrices where the shape of `linear` has more axes.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        *outer, inputs = linear.shape
        blocks = linear.array("_blocks", (*outer, -(-inputs // BLOCK), BLOCK // 2), "uint8")
        scale = linear.array("_scales", (*outer, -(-inputs // BLOCK)), "uint8", "float8_e8m0fnu")
        codes = unpack_bytes(blocks).reshape(*outer, -1)[..., :inputs]
        return pack(codes, scale.view("uint8"), bits=4, code="e2m1", group=BLOCK, dtype=linear.dtype)


def read_mxfp4(linear: StoredLinear, codes_ending: str) -> Quantized:
    """Read a matrix of bytes [N, K / 2] with exponents `weight_scale` [N, K / 32]: s stands for 2 ** (s - 127).

    Raises:
        ValueError: an array is missing, or has a wrong shape, dtype or value.
    """
    outputs, inputs = linear.shape
    codes = unpack_bytes(linear.array(codes_ending, (outputs, -(-inputs // 2)), "uint8"))[:, :inputs]
    shape = outputs, num_groups(inputs, BLOCK)
    scale = linear.array(".weight_scale", shape, "uint8", "float8_e8m0fnu").view("uint8")
    return pack(codes, scale, bits=4, code="e2m1", group=BLOCK, dtype=linear.dtype)
