"""The tensors of a GGUF file, and the matrices that it stores in codes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.gguf.architectures import architecture_of
from specjax.models.gguf.blocks import FLOATS, floats_of
from specjax.models.gguf.config import config_of
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.header import Header, read_header
from specjax.models.gguf.latents import KeysAndValues, joined
from specjax.models.gguf.names import name_of, rows_of
from specjax.models.gguf.places import Number, Place
from specjax.models.quantization import StoredLinear
from specjax.models.quantized import Quantized

OF_CONFIG = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # which the config has read
ENDS = "scale", "input_scale"  # of the names of tensors beside a matrix in NVFP4


@dataclass(frozen=True)
class GGUFFile:
    """The tensors of a GGUF file by their names in transformers. The interface is the same as in safetensors."""

    header: Header
    entries: dict[str, Place | KeysAndValues | Number]

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self.entries)

    def get_slice(self, name: str) -> "GGUFSlice":
        """Return a tensor, of which `[index]` reads a part as floats."""
        return GGUFSlice(self, name)


@dataclass(frozen=True)
class GGUFSlice:
    """A tensor in a GGUF file."""

    file: GGUFFile
    name: str

    @property
    def _place(self) -> Place | KeysAndValues | Number:
        return self.file.entries[self.name]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._place.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as safetensors has it."""
        kind = self._place.kind
        return kind if kind in FLOATS else "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._place.floats(self.file.header, index if isinstance(index, tuple) else (index,))


@dataclass(frozen=True)
class GGUFScheme:
    """How a GGUF file stores matrices, as `specjax.models.quantization.Scheme` says it."""

    path: Path
    unneeded: tuple[str, ...] = ()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the file has a matrix in codes that stay."""
        found = open_gguf(self.path).entries.get(f"{linear.name}.weight")
        return found is not None and found.is_kept

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of such a matrix."""
        return open_gguf(self.path).entries[f"{linear.name}.weight"].shape

    def read(self, linear: StoredLinear) -> Quantized:
        """Read such a matrix.

        Raises:
            ValueError: the matrix has another shape, a scale is infinite or NaN, or inputs cannot be put in order.
        """
        file, name = open_gguf(self.path), f"{linear.name}.weight"
        place = file.entries[name]
        assert isinstance(place, Place), "others do not stay in codes"
        if place.shape != linear.shape:
            raise ValueError(f"tensor {name} in {self.path} must have shape {linear.shape}, got {place.shape}")
        return place.matrix(file.header, linear.dtype)


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
    places: dict[str, Place] = {}
    scales = {name: _scales(header, name, architecture.of_layer) for name in header.tensors}
    unneeded = {*OF_CONFIG, *(f"{name.removesuffix('weight')}{end}" for name in scales for end in ENDS if scales[name])}
    for name, entry in header.tensors.items():
        if name in unneeded:
            continue
        has_offset = architecture.has_norm_offset and name.endswith("norm.weight")
        place = Place(entry, rows=rows_of(name, entry.shape[0], heads), change=_less_one if has_offset else None)
        for apart, of_part in _apart(name_of(name, architecture.of_layer), place, scales[name]):
            places |= architecture.parts(apart, of_part, config)
    numbers = {
        f"model.layers.{i}.{of_layer}": Number(number)
        for field, of_layer in architecture.numbers
        for i, number in enumerate(Fields(header).numbers(field, config["num_hidden_layers"]))
    }
    return GGUFFile(header, joined(places) | numbers)


def _less_one(scale: np.ndarray) -> np.ndarray:
    return scale - 1


def _scales(header: Header, name: str, of_layer: dict[str, str]) -> list[float]:
    """Return the scales of the matrices of a tensor in NVFP4, one for all or one for each; none of other tensors.

    Raises:
        ValueError: the tensor of the scales has another shape or type, or another meaning in the architecture.
    """
    entry = header.tensors[name]
    other = header.tensors.get(f"{name.removesuffix('weight')}scale")
    if entry.kind.name != "NVFP4" or not name.endswith(".weight") or other is None:
        return []
    number = entry.shape[0] if len(entry.shape) > 2 else 1
    if f"{name.split('.')[-2]}.scale" in of_layer:
        raise ValueError(
            f"tensor {name} in {header.path} must not be in NVFP4, whose scale has the name of another tensor of "
            f"{header.fields['general.architecture']}"
        )
    if other.kind.name not in FLOATS or other.shape not in ((1,), (number,)):
        expected = " or ".join(f"({size},)" for size in sorted({1, number}))
        raise ValueError(
            f"tensor {other.name} in {header.path} must be floats of shape {expected}, got {other.kind.name} "
            f"{other.shape}"
        )
    return floats_of(header.bytes_of(other), other.kind.name).ravel().astype(float).tolist()


def _apart(name: str, place: Place, scales: list[float]) -> Iterator[tuple[str, Place]]:
    """Return a tensor by its name in transformers; the tensor of all experts as a tensor for each matrix of each."""
    if "*" not in name:
        yield name, replace(place, scale=scales[0]) if scales else place
        return
    number, *shape = place.entry.shape
    scales = scales * number if len(scales) == 1 else scales
    size = place.entry.num_bytes // number
    for i in range(number):
        one = replace(place.entry, shape=tuple(shape), start=place.entry.start + i * size)
        of_one, scale = name.replace("*", str(i)), scales[i] if scales else None
        if not name.endswith(".gate_up_proj.weight"):
            yield of_one, Place(one, scale=scale)
            continue
        outputs, inputs = shape
        for j, part in enumerate(("gate_proj", "up_proj")):
            rows = np.arange(outputs // 2) + j * (outputs // 2)
            yield of_one.replace("gate_up_proj", part), Place(one, (outputs // 2, inputs), rows, scale=scale)
