"""AutoRound: integers in the layout of GPTQ or AWQ, in which a matrix may have bits and groups unlike the others.

Source: intel/auto-round, whose table quantization_config names the layout in packing_format and such matrices in
extra_config, by name or pattern.
"""

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.awq import AWQ
from specjax.models.quantization.by_name import ByName, changed, pattern_of
from specjax.models.quantization.gptq import GPTQ

LAYOUTS = {"auto_round:auto_gptq": GPTQ, "auto_round:auto_awq": AWQ}
FLOAT_BITS = 16  # the fewest bits of a matrix that is not rounded


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "auto-round"


class AutoRound(ByName):
    """How the files of a checkpoint store matrices of integers with scales for groups of inputs."""

    @classmethod
    def of(cls, config: ConfigFile) -> "AutoRound":
        """Read the table quantization_config.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        layout = LAYOUTS[config.choice("packing_format", tuple(LAYOUTS), default="auto_round:auto_gptq")]
        config.only("data_type", "int")
        if config.fields.get("spinquant_config"):
            raise config.refused("spinquant_config")  # rotations of activations
        tables = {name: changed(config, "extra_config", name) for name in config.get("extra_config", dict, {})}
        others = [
            (pattern_of(config, "extra_config", rf"(?:{name})\Z"), layout.of(table))
            for name, table in tables.items()
            if table.get("bits", int) < FLOAT_BITS
        ]
        return cls(layout.of(config), tuple(others))
