"""GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, in two versions of the zeros."""

from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.by_name import ByName, changed, pattern_of
from specjax.models.quantization.linear_files import FLOATS, StoredLinear, num_groups, order_of, signed, unpack
from specjax.models.quantized import Quantized, pack


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "gptq"


@dataclass(frozen=True)
class GPTQ:
    """How the files of a checkpoint store matrices of integers with scales for groups of inputs."""

    bits: int
    group: int | None  # inputs that share a scale; None is all
    is_symmetric: bool
    zeros_less_one: bool  # whether the stored zeros are one less than the zeros, as in version 1
    has_order: bool  # whether groups are of inputs that lie apart
    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "GPTQ | ByName":
        """Read the table quantization_config, whose field dynamic gives matrices other fields by patterns of names.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        bits = config.get("bits", int)
        if bits not in (4, 8):
            raise ValueError(
                f"{config.where('bits')} must be 4 or 8, the only values that specjax supports, got {bits}"
            )
        dynamic = config.get("dynamic", dict, {})
        for name in ("lm_head", "true_sequential", "static_groups"):
            config.get(name, bool, False)
        version = config.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
        usual = cls(
            bits,
            group_size(config, "group_size"),
            config.get("sym", bool, True),
            version == "gptq",
            config.get("desc_act", bool, False),
        )
        others = [
            # Matrices after "-:" are floats in the files, whatever their fields are.
            (
                pattern_of(config, "dynamic", text.removeprefix("+:").removeprefix("-:")),
                usual if text.startswith("-:") else cls.of(changed(config, "dynamic", text)),
            )
            for text in dynamic
        ]
        return ByName(usual, tuple(others)) if others else usual

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the files have the codes of a matrix."""
        return linear.has(".qweight")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return linear.entry(".scales").shape[-1], linear.entry(".qweight").shape[0] * (32 // self.bits)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        outputs, inputs = linear.shape
        in_word, groups = 32 // self.bits, num_groups(inputs, self.group)
        words = linear.array(".qweight", (-(-inputs // in_word), outputs), "int32")
        codes = unpack(words, self.bits, inputs, axis=0).T
        stored = linear.array(".qzeros", (groups, -(-outputs // in_word)), "int32")
        zero = self._zeros(unpack(stored, self.bits, outputs))
        scale = linear.array(".scales", (groups, outputs), *FLOATS).T
        order = None
        if self.group is not None and (self.has_order or linear.has(".g_idx")):
            order = order_of(linear, ".g_idx", self.group)
        codes = codes if order is None else codes[:, order]
        zero = None if zero is None else zero.T
        if self.bits == 8:
            codes, zero = signed(np.ascontiguousarray(codes)), None if zero is None else zero - np.int16(128)
        return pack(
            np.ascontiguousarray(codes),
            np.ascontiguousarray(scale),
            bits=self.bits,
            group=self.group,
            zero=None if zero is None else np.ascontiguousarray(zero),
            order=order,
            dtype=linear.dtype,
        )

    def _zeros(self, stored: np.ndarray) -> np.ndarray | None:
        """Return the zeros [K / group, N] int16, None where all are the middle of the codes."""
        middle = 2 ** (self.bits - 1)
        # Symmetric codes have no other zero than the middle. Some tools store it by version 2 and write version 1.
        if self.is_symmetric and ((stored == middle).all() or (stored == middle - 1).all()):
            return None
        zero = stored.astype(np.int16) + np.int16(self.zeros_less_one)
        return None if (zero == middle).all() else zero


def group_size(config: ConfigFile, name: str) -> int | None:
    """Return the field with the number of inputs that share a scale; None where -1 says all.

    Raises:
        ValueError: the field is missing, or neither -1 nor a size.
    """
    size = config.get(name, int)
    if size != -1 and size < 1:
        raise ValueError(f"{config.where(name)} must be -1 or a number of inputs, got {size}")
    return None if size == -1 else size
