"""The tensors of a GGUF file, and the matrices that it stores in codes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.gguf.architectures import architecture_of
from specjax.models.gguf.blocks import FLOATS, KEPT, floats_of, matrix_of
from specjax.models.gguf.config import config_of
from specjax.models.gguf.header import Entry, Header, read_header
from specjax.models.gguf.names import name_of, rows_of
from specjax.models.quantization import StoredLinear
from specjax.models.quantized import Quantized

OF_CONFIG = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # which the config has read


@dataclass(frozen=True)
class GGUFFile:
    """The tensors of a GGUF file by their names in transformers. The interface is the same as in safetensors."""

    header: Header
    entries: dict[str, tuple[Entry, np.ndarray | None]]  # with the row of the file that each row is, if they differ
    has_norm_offset: bool  # whether the file stores one more than the scale of a norm

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self.entries)

    def get_slice(self, name: str) -> "GGUFSlice":
        """Return a tensor, of which `[index]` reads a part as floats."""
        return GGUFSlice(self, name)

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Return the bytes of some rows of a tensor, [rows, bytes of a row]."""
        entry, order = self.entries[name]
        content = self.header.bytes_of(entry)
        return np.asarray(content[index] if order is None else content[order[index]])


@dataclass(frozen=True)
class GGUFSlice:
    """A tensor in a GGUF file."""

    file: GGUFFile
    name: str

    @property
    def _entry(self) -> Entry:
        return self.file.entries[self.name][0]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as safetensors has it."""
        kind = self._entry.kind.name
        return kind if kind in FLOATS else "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        shape, kind = self._entry.shape, self._entry.kind.name
        if len(shape) == 1:
            content = np.ascontiguousarray(self.file.header.bytes_of(self._entry))
            values, order = floats_of(content, kind)[0], self.file.entries[self.name][1]
            values = values if order is None else values[order]
            has_offset = self.file.has_norm_offset and self.name.endswith("norm.weight")
            return (values - 1 if has_offset else values)[index]
        first, *rest = index if isinstance(index, tuple) else (index,)
        return floats_of(self.file.rows(self.name, first), kind)[(slice(None), *rest)]


@dataclass(frozen=True)
class GGUFScheme:
    """How a GGUF file stores matrices, as `specjax.models.quantization.Scheme` says it."""

    path: Path
    unneeded: tuple[str, ...] = ()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the file has a matrix in codes that stay."""
        found = open_gguf(self.path).entries.get(f"{linear.name}.weight")
        return found is not None and found[0].kind.name in KEPT

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of such a matrix."""
        return open_gguf(self.path).entries[f"{linear.name}.weight"][0].shape

    def read(self, linear: StoredLinear) -> Quantized:
        """Read such a matrix.

        Raises:
            ValueError: the matrix has another shape, or a scale is infinite or NaN.
        """
        file, name = open_gguf(self.path), f"{linear.name}.weight"
        entry = file.entries[name][0]
        if entry.shape != linear.shape:
            raise ValueError(f"tensor {entry.name} in {self.path} must have shape {linear.shape}, got {entry.shape}")
        return matrix_of(file.rows(name, slice(None)), entry.kind.name, linear.dtype)


def open_gguf(path: Path) -> GGUFFile:
    """Return the tensors of a GGUF file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or its architecture is unknown.
    """
    stat = path.stat()
    return _file(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _file(path: Path, changed: int, size: int) -> GGUFFile:
    header = read_header(path)
    config, architecture = config_of(header), architecture_of(header)
    heads = {}
    if architecture.has_halves_between:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    entries = {
        name_of(name, architecture.of_layer): (entry, rows_of(name, entry.shape[0], heads))
        for name, entry in header.tensors.items()
        if name not in OF_CONFIG
    }
    apart = [item for name, (entry, order) in entries.items() for item in _apart(name, entry, order)]
    return GGUFFile(header, dict(apart), architecture.has_norm_offset)


def _apart(name: str, entry: Entry, order: np.ndarray | None) -> Iterator[tuple[str, tuple[Entry, np.ndarray | None]]]:
    """Return a tensor by its name in transformers; the tensor of all experts as a tensor for each."""
    if "*" not in name:
        yield name, (entry, order)
        return
    number, *shape = entry.shape
    size = entry.num_bytes // number
    for i in range(number):
        one = replace(entry, shape=tuple(shape), start=entry.start + i * size)
        yield name.replace("*", str(i)), (one, None)
