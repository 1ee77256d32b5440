"""The formats of quantised checkpoints, one file each, and how the files of a checkpoint say which format they have.

A format is a frozen dataclass with `of(config)`, which checks the fields of quantization_config, with
`is_quantized(linear)` and `shape(linear)`, and with `read(linear)`, which turns the stored arrays of one matrix into a
`Quantized` of NumPy arrays. A new format is a file, an import and an entry here, and a fabricated file in
tests/quantized_files.py.
"""

from types import ModuleType
from typing import Any, Protocol

from specjax.models.config_file import ConfigFile
from specjax.models.quantization import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from specjax.models.quantization.linear_files import StoredLinear
from specjax.models.quantized import Quantized

__all__ = ["Scheme", "StoredLinear", "name_of_matrix", "reads_stack", "scheme_of"]

CODES = (
    ".weight_packed",
    ".qweight",
    torchao.CODES,
)  # endings of the names of codes that do not have the name of floats


class Scheme(Protocol):
    """How the files of a checkpoint store the matrices of a network."""

    @property
    def unneeded(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that belong to no matrix, and that nothing reads."""
        ...

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether a matrix is stored in codes, rather than as floats."""
        ...

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of such a matrix, as the headers of the files tell it."""
        ...

    def read(self, linear: StoredLinear) -> Quantized:
        """Read such a matrix, as NumPy arrays."""
        ...


FORMATS: tuple[tuple[ModuleType, Any], ...] = (
    (fp8, fp8.FP8),
    (mxfp4, mxfp4.MXFP4),
    (compressed_tensors, compressed_tensors.CompressedTensors),
    (awq, awq.AWQ),
    (gptq, gptq.GPTQ),
    (auto_round, auto_round.AutoRound),
    (modelopt, modelopt.ModelOpt),
    (bitsandbytes, bitsandbytes.BitsAndBytes),
    (quark, quark.Quark),
    (torchao, torchao.TorchAO),
)


def name_of_matrix(name: str) -> str:
    """Return the name that a tensor of codes would have if it held floats; other names come back as they are."""
    ending = next((ending for ending in CODES if name.endswith(ending)), None)
    return name if ending is None else f"{name.removesuffix(ending)}.weight"


def reads_stack(scheme: Scheme, linear: StoredLinear) -> bool:
    """Return whether a format reads a stack of matrices that the files have as one tensor, in codes."""
    if linear.has(".weight"):
        return False
    if isinstance(scheme, fp8.FP8):
        return not linear.inputs_first or linear.has("_scale")
    return isinstance(scheme, mxfp4.MXFP4 | modelopt.ModelOpt)


def scheme_of(config: ConfigFile) -> Scheme:
    """Return how a checkpoint stores its matrices.

    Args:
        config: the table quantization_config of config.json, or hf_quant_config.json.

    Raises:
        ValueError: the format is unknown; a field is missing, has a wrong value, or is not supported.
    """
    for module, scheme in FORMATS:
        if module.matches(config):
            return scheme.of(config)
    known = ", ".join(module.__name__.rpartition(".")[2].replace("_", "-") for module, _ in FORMATS)
    raise ValueError(
        f"{config.where('quant_method')} must be one of {known} (docs/models.md), got "
        f"{config.fields.get('quant_method')!r}; give the checkpoint in one of them, or in bfloat16"
    )
