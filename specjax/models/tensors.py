"""Read the tensors of a checkpoint, each once, straight to its dtype and its devices."""

import contextlib
import copy
import fnmatch
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.models.config_file import read_json
from specjax.models.diagnosis import check_not_pointer, lacks
from specjax.models.torch_file import TorchFile, open_torch_file
from specjax.types import Array

CHUNK_BYTES = 8 << 20  # maximum number of bytes copied from a file at once, counted as float32
LOG_SECONDS = 10.0  # between two lines of the log while tensors are read
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # supported dtypes of stored tensors, with bytes per number

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """An array that is still in the files of a checkpoint, where a parameter of a model will be."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[np.ndarray, Sequence[tuple[int, int]]], None]  # writes the part within bounds [start, stop)

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Tensors:
    """Give access to the tensors of some files, each safetensors or, by its ending .bin or .pt, written by torch.save.

    Only the headers of the files are read at first. When a tensor is requested, its values are copied in chunks, in the
    requested dtype, into the array that goes to the device; on a CPU that array is used as it is. With a sharding, only
    the part that a device holds is read for it. With `in_parts` nothing is read yet: tensors are given as `Stored`, so
    that the caller, which knows the devices, reads them. Names in the files may lack the prefix "model.", as they do if
    a model was saved without its head.

    Args:
        directory: directory of the checkpoint.
        dtype: dtype of the arrays.
        sharding: sharding of the arrays; None is the default device.
        files: the files; None is model.safetensors, or the shards that model.safetensors.index.json names.
        in_parts: whether tensors are given as `Stored`; they are then on the devices of the sharding in the end.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged. The reading methods raise it for a tensor that is missing or has another shape
            than the one requested, or a dtype that is not supported.
    """

    def __init__(
        self,
        directory: Path,
        dtype: np.dtype,
        sharding: jax.sharding.Sharding | None = None,
        files: Sequence[Path] | None = None,
        in_parts: bool = False,
    ):
        self._directory, self._dtype, self._sharding, self._in_parts = directory, dtype, sharding, in_parts
        self._paths = {}  # maps the name of a tensor to its file
        self._unread = {}  # maps the name of an unread tensor to its number of bytes
        self._advance = lambda num_bytes: None
        for path in _shards(directory, "model.safetensors") if files is None else files:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118, the file is not a dict
                    entry = file.get_slice(name)
                    self._paths[name] = path
                    self._unread[name] = math.prod(entry.get_shape()) * DTYPES.get(entry.get_dtype(), 1)

    def anew(
        self, dtype: np.dtype, sharding: jax.sharding.Sharding | None = None, *, in_parts: bool = False
    ) -> "Tensors":
        """Return the tensors of the same files for other arrays; this object must have read none of them.

        The headers of the files are not read again.
        """
        other = copy.copy(self)
        other._dtype, other._sharding, other._in_parts = dtype, sharding, in_parts
        other._unread = dict(self._unread)
        return other

    @property
    def on_one_gpu(self) -> bool:
        """Whether every array, or the part of it that a device works with, is on exactly one GPU."""
        devices = jnp.zeros(()).devices() if self._sharding is None else self._sharding.device_set
        is_whole = self._sharding is None or self._sharding.is_fully_replicated
        return (is_whole or self._in_parts) and all(device.platform == "gpu" for device in devices)

    def __contains__(self, name: str) -> bool:
        return name in self._paths or name.removeprefix("model.") in self._paths

    def names(self) -> list[str]:
        """Return the names of all tensors, as the files have them."""
        return list(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        with _open(self._paths[self._find(name)]) as file:
            return tuple(file.get_slice(self._find(name)).get_shape())

    def integers(self, name: str, size: int) -> np.ndarray:
        """Read a vector of whole numbers, or of truth values, as it is stored."""
        path = self._paths[self._find(name)]
        with _open(path) as file:
            values = np.asarray(file.get_slice(self._find(name))[:])
        if values.shape != (size,) or values.dtype.kind not in "iub":
            raise ValueError(
                f"tensor {name} in {path} must be of integers of shape ({size},), got {values.dtype} {values.shape}"
            )
        self._mark_read(name)
        return values

    def table(self, name: str, *shape: int) -> Array:
        """Read a matrix, or another array of two axes or more, as it is stored."""
        return self._read({name: shape})

    def vectors(self, sizes: dict[str, int]) -> Array:
        """Read vectors, given their sizes by name, and concatenate them."""
        return self._read({name: (size,) for name, size in sizes.items()})

    def matrices(self, inputs: int, outputs: dict[str, int], *, transposed: bool = False) -> Array:
        """Read matrices of one input and concatenate their outputs: [inputs, sum of outputs], or its transpose.

        Args:
            inputs: number of inputs of every matrix.
            outputs: number of outputs of each matrix, by name.
            transposed: whether to return [sum of outputs, inputs], which is the orientation in the files.
        """
        return self._read({name: (size, inputs) for name, size in outputs.items()}, transpose=not transposed)

    def check_same(self, name: str, other: str, *shape: int) -> None:
        """Raise ValueError if the files hold the tensor `name` and it differs from the tensor `other`."""
        if name not in self._paths:
            return
        self._check(name, shape)
        for rows in _chunks(0, shape[0], math.prod(shape[1:])):
            if not np.array_equal(self._read_slice(name, rows), self._read_slice(other, rows)):
                raise ValueError(f"tensor {name} in {self._paths[name]} must equal {other}, which it is tied to")
        self._mark_read(name)

    def check_all_read(self, *ignored: str) -> None:
        """Raise ValueError for a tensor that has not been read, unless its name matches a pattern in `ignored`."""
        for name in self._unread:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
                raise ValueError(f"tensor {name} in {self._paths[name]} does not belong to a model of this config")

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show a progress bar on standard error while reading, if it is a terminal and rich is installed; else log."""
        if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
            self._advance = self._logged(sum(self._unread.values()))
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"loading {self._directory.name}", total=sum(self._unread.values()))
            self._advance = lambda num_bytes: bar.advance(task, num_bytes)
            yield

    def _logged(self, total: int) -> Callable[[int], None]:
        """Return a function that is told of bytes that were read, and logs every `LOG_SECONDS` how many."""
        num_read, logged = 0, time.monotonic()

        def advance(num_bytes: int) -> None:
            nonlocal num_read, logged
            num_read += num_bytes
            if time.monotonic() >= logged + LOG_SECONDS:
                logged = time.monotonic()
                logger.info("loading %s: %.2f of %.2f GB", self._directory.name, num_read / 1e9, total / 1e9)

        return advance

    def _find(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._paths:
                return candidate
        raise ValueError(f"tensor {name} is missing from {self._directory}")

    def _mark_read(self, name: str) -> None:
        self._unread.pop(self._find(name), None)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the stored tensor has this shape and a supported dtype."""
        path = self._paths[self._find(name)]
        with _open(path) as file:
            entry = file.get_slice(self._find(name))
            stored, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if stored != shape:
            raise ValueError(f"tensor {name} in {path} must have shape {shape}, got {stored}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} in {path} must be of type F32, BF16 or F16, got {dtype}")

    def _read_slice(self, name: str, index: slice | tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a stored tensor.

        The file is opened for this call alone, so that its mapped pages do not add up in memory.
        """
        name = self._find(name)
        with _open(self._paths[name]) as file:
            values = file.get_slice(name)[index]
        self._advance(values.nbytes)
        return values

    def _read(self, shapes: dict[str, tuple[int, ...]], transpose: bool = False) -> Any:
        """Concatenate tensors along their first axis, and transpose the result if `transpose` is true."""
        for name, shape in shapes.items():
            self._check(name, shape)
        whole = (sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:])

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            if transpose:
                self._fill(out.T, list(bounds)[::-1], shapes)
            else:
                self._fill(out, list(bounds), shapes)

        stored = Stored(whole[::-1] if transpose else whole, self._dtype, fill)
        array = stored if self._in_parts else place(stored, self._sharding)
        for name in shapes:
            self._mark_read(name)
        return array

    def _fill(self, out: np.ndarray, bounds: list[tuple[int, int]], shapes: dict[str, tuple[int, ...]]) -> None:
        """Write to `out` the part within `bounds` of the tensors concatenated along their first axis."""
        (first, last), *rest = bounds
        columns = tuple(slice(*bound) for bound in rest)
        width = math.prod(stop - start for start, stop in rest)
        offset = 0  # row of the concatenation where the tensor begins
        for name, shape in shapes.items():
            for rows in _chunks(max(first - offset, 0), min(last - offset, shape[0]), width):
                out[rows.start + offset - first : rows.stop + offset - first] = self._read_slice(name, (rows, *columns))
            offset += shape[0]


def place(stored: Stored, sharding: jax.sharding.Sharding | None) -> Array:
    """Read an array to its devices, so that the host holds the part of one device at a time.

    Devices with the same part share one read of it, and devices of other processes are left to these. A sharding of
    None is the default device.
    """

    def read(bounds: Sequence[tuple[int, int]], devices: Sequence[Any]) -> list[Array]:
        part = _aligned_empty([stop - start for start, stop in bounds], stored.dtype)
        stored.fill(part, bounds)
        return jax.block_until_ready([jax.device_put(part, device) for device in devices])

    if sharding is None:
        return read([(0, size) for size in stored.shape], [None])[0]
    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(stored.shape).items():
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index or (), stored.shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    parts = [part for bounds, devices in owners.items() for part in read(bounds, devices)]
    return jax.make_array_from_single_device_arrays(stored.shape, sharding, parts, dtype=stored.dtype)


def _chunks(begin: int, end: int, width: int) -> Iterator[slice]:
    """Return the rows [begin, end) as slices of at most CHUNK_BYTES each, but at least one row."""
    step = max(1, CHUNK_BYTES // (4 * max(1, width)))
    return (slice(row, min(row + step, end)) for row in range(begin, end, step))


def _aligned_empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose memory is aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[safe_open | TorchFile]:
    """Open a file of tensors; turn errors of the format into ValueError."""
    if path.suffix in (".bin", ".pt"):
        with open_torch_file(path) as file:
            yield file
        return
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        check_not_pointer(path)
        raise ValueError(f"{path} must be a whole safetensors file, copy it anew: {error}") from error


def drafter_files(directory: Path) -> list[Path]:
    """Return the files with the tensors of a drafter: safetensors, or else those that torch.save wrote.

    Raises:
        FileNotFoundError: there are none, or an index names a file that does not exist.
        ValueError: an index is damaged.
    """
    names = "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
    for name in names:
        if (directory / name).is_file() or (directory / f"{name}.index.json").is_file():
            return _shards(directory, name)
    raise lacks(directory, *names)


def _shards(directory: Path, name: str) -> list[Path]:
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
