"""MXFP4 as gpt-oss has it: `_blocks` of 16 bytes with 32 codes of e2m1, and `_scales` that are exponents."""

from dataclasses import dataclass

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import StoredLinear, unpack_bytes
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
