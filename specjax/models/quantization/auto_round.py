"""AutoRound: integers in the layout of GPTQ or AWQ, or floats of 4 and 8 bits, with matrices unlike the others.

Source: intel/auto-round, whose table quantization_config names the layout in packing_format and such matrices in
extra_config, by name or pattern.
"""

import re
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.awq import AWQ
from specjax.models.quantization.by_name import ByName, changed, pattern_of
from specjax.models.quantization.compressed_tensors import MODULE, CompressedTensors, Group
from specjax.models.quantization.fp8 import FP8
from specjax.models.quantization.gptq import GPTQ

ZEROS_AS_THEY_ARE = "auto_round", "auto_round:gptqmodel"  # layouts of GPTQ that do not store a zero less one
OF_INTEGERS = {name: GPTQ for name in ("auto_round:auto_gptq", *ZEROS_AS_THEY_ARE)} | {"auto_round:auto_awq": AWQ}
OF_FLOATS = {  # the layout of each kind of floats, by its bits, as compressed-tensors names it
    "mx_fp": {4: "mxfp4-pack-quantized", 8: "mxfp8-quantized"},
    "nv_fp": {4: "nvfp4-pack-quantized"},
    "fp": {8: "float-quantized"},
}
OTHER_NAMES = {"mx_fp_rceil": "mx_fp", "nv_fp4_with_static_gs": "nv_fp"}  # of kinds whose scales are found otherwise
FLOAT_BITS = 16  # the fewest bits of a matrix that is not rounded
OF_PATTERNS = frozenset("*+?^$()[]{}|\\")


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "auto-round"


class AutoRound(ByName):
    """How the files of a checkpoint store matrices of integers or floats of few bits."""

    @classmethod
    def of(cls, config: ConfigFile) -> "AutoRound":
        """Read the table quantization_config.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        if config.fields.get("spinquant_config"):
            raise config.refused("spinquant_config")  # rotations of activations
        names = sorted(config.get("extra_config", dict, {}), key=lambda name: not OF_PATTERNS.isdisjoint(name))
        tables = {name: changed(config, "extra_config", name) for name in names}  # those without a pattern go first
        others = [
            (pattern_of(config, "extra_config", _pattern(name)), _layout(table))
            for name, table in tables.items()
            if table.get("bits", int) < FLOAT_BITS
        ]
        return cls(_layout(config), tuple(others))


def _pattern(name: str) -> str:
    """Return the pattern of names that a name in extra_config stands for: of itself, or of those with a match in them.

    AutoRound itself looks for a match anywhere in a name.
    """
    return rf"{re.escape(name)}\Z" if OF_PATTERNS.isdisjoint(name) else f".*(?:{name})"


def _layout(config: ConfigFile) -> Any:
    """Return the `Scheme` of matrices with the fields of a table.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    kind = config.choice("data_type", ("int", *OF_FLOATS, *OTHER_NAMES), default="int")
    if kind == "int":
        packing = config.choice("packing_format", tuple(OF_INTEGERS), default="auto_round:auto_gptq")
        version = "gptq_v2" if packing in ZEROS_AS_THEY_ARE else None
        return OF_INTEGERS[packing].of(config.with_defaults(checkpoint_format=version))
    layouts, bits = OF_FLOATS[OTHER_NAMES.get(kind, kind)], config.get("bits", int)
    if bits not in layouts:
        raise ValueError(f"{config.where('bits')} must be {' or '.join(map(str, layouts))} for {kind!r}, got {bits}")
    if kind == "fp":
        return FP8(None)
    return CompressedTensors((Group((MODULE,), layouts[bits], bits, True, None, None, False, False),), ())
