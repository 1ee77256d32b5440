"""The files of a checkpoint that hold tensors, and the arrays in them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.models.config_file import read_json
from specjax.models.diagnosis import check_not_pointer, lacks
from specjax.models.gguf.tensors import open_gguf
from specjax.models.safetensors_file import DTYPES as ARRAY_DTYPES
from specjax.models.safetensors_file import read_array
from specjax.models.torch_file import open_torch_file


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, as `quantization` takes it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # the name of the dtype in safetensors
    advance: Callable[[int], None]

    @property
    def dtype(self) -> str:
        return ARRAY_DTYPES[self.kind].name if self.kind in ARRAY_DTYPES else self.kind

    @property
    def place(self) -> str:
        return f"tensor {self.name} in {self.path}"

    def read(self) -> np.ndarray:
        if self.path.suffix in (".bin", ".pt"):
            with opened(self.path) as file:
                values = np.asarray(file.get_slice(self.name)[...])
        else:
            values = read_array(self.path, self.name)
        self.advance(values.nbytes)
        return values


def model_files(directory: Path) -> list[Path]:
    """Return the files with the tensors of a model: safetensors, or else those that torch.save wrote.

    Raises:
        FileNotFoundError: there are none, or an index names a file that does not exist.
        ValueError: an index is damaged.
    """
    return _first_of(directory, "model.safetensors", "pytorch_model.bin")


def drafter_files(directory: Path) -> list[Path]:
    """Return the files with the tensors of a drafter: safetensors, or else those that torch.save wrote.

    Raises:
        FileNotFoundError: there are none, or an index names a file that does not exist.
        ValueError: an index is damaged.
    """
    return _first_of(
        directory, "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
    )


def _first_of(directory: Path, *names: str) -> list[Path]:
    """Return the first of some files that is there, or the shards that its index names."""
    for name in names:
        if (directory / name).is_file() or (directory / f"{name}.index.json").is_file():
            return shards_of(directory, name)
    raise lacks(directory, *names)


def shards_of(directory: Path, name: str) -> list[Path]:
    """Return the file of this name, or the shards that its index names."""
    index = directory / f"{name}.index.json"
    if (directory / name).is_file():
        return [directory / name]
    if not index.is_file():
        raise lacks(directory, name, index.name)
    weight_map = read_json(index).get("weight_map")
    names: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"weight_map in {index} must map names of tensors to names of files, got {weight_map!r}")
    paths = [directory / name for name in sorted(set(names))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, which {index.name} names; copy the checkpoint anew")
    return paths


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors; turn errors of the format into ValueError."""
    if path.suffix in (".bin", ".pt"):
        with open_torch_file(path) as file:
            yield file
        return
    if path.suffix == ".gguf":
        yield open_gguf(path)
        return
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        check_not_pointer(path)
        raise ValueError(f"{path} must be a whole safetensors file, copy it anew: {error}") from error
