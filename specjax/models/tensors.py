"""The tensors of a checkpoint, each read once, straight to its dtype and its devices."""

import contextlib
import fnmatch
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.models.config_file import read_json
from specjax.types import Array

CHUNK_BYTES = 8 << 20  # most that is copied from a file at once
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # of stored tensors: bytes of a number


class Tensors:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names.

    Nothing but the headers is read before a tensor is asked for; then its values go in chunks into the array that the
    device takes (or, on a CPU, is), in the wanted dtype, and with a sharding only what a device holds is read for it.
    A name may lack the prefix "model." in the files, as where a model was saved without its head.

    Args:
        directory: of the checkpoint.
        dtype: of the arrays.
        sharding: of the arrays; None is the default device.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged.
    """

    def __init__(self, directory: Path, dtype: np.dtype, sharding: jax.sharding.Sharding | None = None):
        self._directory, self._dtype, self._sharding = directory, dtype, sharding
        self._paths = {}  # name of a tensor: its file
        self._unread = {}  # name of a tensor: its bytes
        self._advance = lambda num_bytes: None
        for path in _files(directory):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118, it is no dict
                    entry = file.get_slice(name)
                    self._paths[name] = path
                    self._unread[name] = math.prod(entry.get_shape()) * DTYPES.get(entry.get_dtype(), 1)

    @property
    def on_one_gpu(self) -> bool:
        """Whether that is where the tensors go."""
        devices = jax.local_devices()[:1] if self._sharding is None else list(self._sharding.device_set)
        return len(devices) == 1 and devices[0].platform == "gpu"

    def table(self, name: str, rows: int, columns: int) -> Array:
        """A matrix as it is stored: [rows, columns]."""
        return self._read({name: (rows, columns)})

    def vectors(self, sizes: dict[str, int]) -> Array:
        """Vectors one behind the other, given their sizes by name."""
        return self._read({name: (size,) for name, size in sizes.items()})

    def matrices(self, inputs: int, outputs: dict[str, int], *, transposed: bool = False) -> Array:
        """Matrices side by side: [inputs, sum of outputs], or transposed, which is how they are stored."""
        return self._read({name: (size, inputs) for name, size in outputs.items()}, transpose=not transposed)

    def check_same(self, name: str, other: str, *shape: int) -> None:
        """Raise ValueError where the files hold the tensor `name` and it differs from `other`."""
        if name not in self._paths:
            return
        self._check(name, shape)
        for rows in _chunks(0, shape[0], shape):
            if not np.array_equal(self._cut(name, rows), self._cut(other, rows)):
                raise ValueError(f"tensor {name} in {self._paths[name]} must equal {other}, which it is tied to")
        self._take(name)

    def check_all_read(self, *ignored: str) -> None:
        """Raise ValueError for a tensor that nothing has read, unless its name matches a pattern of `ignored`."""
        for name in self._unread:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
                raise ValueError(f"tensor {name} in {self._paths[name]} is none that a model of this config has")

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show a progress bar on standard error while reading, if that is a terminal and rich is installed."""
        if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"loading {self._directory.name}", total=sum(self._unread.values()))
            self._advance = lambda num_bytes: bar.advance(task, num_bytes)
            yield

    def _find(self, name: str) -> str:
        """The name that the files have for a tensor."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._paths:
                return candidate
        raise ValueError(f"tensor {name} is missing from {self._directory}")

    def _take(self, name: str) -> None:
        self._advance(self._unread.pop(self._find(name), 0))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        path = self._paths[self._find(name)]
        with _open(path) as file:
            entry = file.get_slice(self._find(name))
            stored, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if stored != shape:
            raise ValueError(f"tensor {name} in {path} must have shape {shape}, got {stored}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} in {path} must be of type F32, BF16 or F16, got {dtype}")

    def _cut(self, name: str, index: slice | tuple[slice, ...]) -> np.ndarray:
        """A part of a stored tensor. The file is mapped no longer than this, so that its pages add to nothing."""
        name = self._find(name)
        with _open(self._paths[name]) as file:
            return file.get_slice(name)[index]

    def _read(self, shapes: dict[str, tuple[int, ...]], transpose: bool = False) -> Array:
        """Tensors one below the other along their first axis, and then transposed if asked for."""
        for name, shape in shapes.items():
            self._check(name, shape)
        whole = (sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:])
        if transpose:
            whole = whole[::-1]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            bounds = [axis.indices(size)[:2] for axis, size in zip(index, whole, strict=True)]
            result = _aligned_empty([stop - start for start, stop in bounds], self._dtype)
            if transpose:
                self._fill(result.T, bounds[::-1], shapes)
            else:
                self._fill(result, bounds, shapes)
            return result

        if self._sharding is None:
            array = jax.device_put(part((slice(None),) * len(whole)))
        else:
            array = jax.make_array_from_callback(whole, self._sharding, part)
        array.block_until_ready()  # so that the host holds one array at a time
        for name in shapes:
            self._take(name)
        return array

    def _fill(self, out: np.ndarray, bounds: list[tuple[int, int]], shapes: dict[str, tuple[int, ...]]) -> None:
        """Write the tensors, one below the other, to `out`, which is what the bounds cut out of them."""
        (first, last), *rest = bounds
        columns = tuple(slice(*bound) for bound in rest)
        offset = 0  # of the tensor
        for name, shape in shapes.items():
            for rows in _chunks(max(first - offset, 0), min(last - offset, shape[0]), shape):
                out[rows.start + offset - first : rows.stop + offset - first] = self._cut(name, (rows, *columns))
            offset += shape[0]


def _chunks(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows from begin to end of a tensor, a few at a time."""
    step = max(1, CHUNK_BYTES // (4 * math.prod(shape[1:])))
    return (slice(row, min(row + step, end)) for row in range(begin, end, step))


def _aligned_empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Memory that starts where the CPU backend of JAX wants it, which then takes it as it is, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file: {error}") from error


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    if not index.is_file():
        raise FileNotFoundError(f"directory must hold model.safetensors or {index.name}, got {directory}")
    weight_map = read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"weight_map in {index} must map names of tensors to names of files, got {weight_map!r}")
    paths = [directory / name for name in sorted(set(names))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {path.name}, which does not exist")
    return paths
