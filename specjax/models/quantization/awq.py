"""AWQ: `qweight`, `qzeros` and `scales` of 4 bits, with the outputs of a word in an order of their own."""

from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.gptq import group_size
from specjax.models.quantization.linear_files import FLOATS, StoredLinear, num_groups, unpack
from specjax.models.quantized import Quantized, pack

PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word each of its 8 outputs is


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "awq"


@dataclass(frozen=True)
class AWQ:
    """How the files of a checkpoint store matrices of 4 bits with scales and zeros for groups of inputs."""

    group: int | None  # inputs that share a scale; None is all
    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "AWQ":
        """Read the table quantization_config.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        config.only("bits" if "bits" in config else "w_bit", 4)
        config.get("zero_point", bool, True)  # AutoRound writes false for symmetric codes, and stores their zeros, too
        version = config.get("version", str, "gemm")
        if version.lower() != "gemm":
            raise ValueError(f"{config.where('version')} must be 'gemm', the only layout that is read, got {version!r}")
        config.get("modules_to_not_convert", list, [])
        return cls(group_size(config, "group_size" if "group_size" in config else "q_group_size"))

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the files have the codes of a matrix."""
        return linear.has(".qweight")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return linear.entry(".scales").shape[-1], linear.entry(".qweight").shape[0]

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        outputs, inputs = linear.shape
        groups, words = num_groups(inputs, self.group), -(-outputs // 8)
        codes = _outputs(linear.array(".qweight", (inputs, words), "int32"), outputs)
        zero = _outputs(linear.array(".qzeros", (groups, words), "int32"), outputs)
        scale = linear.array(".scales", (groups, outputs), *FLOATS)
        codes, scale, zero = (np.ascontiguousarray(x.T) for x in (codes, scale, zero))
        return pack(codes, scale, bits=4, group=self.group, zero=zero, dtype=linear.dtype)


def _outputs(words: np.ndarray, size: int) -> np.ndarray:
    """Return the codes [K, N] in words [K, N / 8]."""
    codes = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return codes[:, :, PLACES].reshape(len(words), -1)[:, :size]
