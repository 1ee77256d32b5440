"""Read the tensors of a checkpoint, each once, straight to its dtype and its devices."""

import contextlib
import copy
import fnmatch
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.files import StoredArray, model_files, opened
from specjax.models.quantization import Scheme, StoredLinear, name_of_matrix, reads_stack
from specjax.models.quantized import Quantized, concatenate, dequantize, format_of, quantize, stack
from specjax.parallel import put
from specjax.types import Array

CHUNK_BYTES = 8 << 20  # maximum number of bytes copied from a file at once, counted as float32
BLOCK_BYTES = 512 << 10  # the same, checked and converted at once: the caches hold it, so that the check costs little
LOG_SECONDS = 10.0  # between two lines of the log while tensors are read
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # supported dtypes of stored tensors, with bytes per number

# endings of the names of the arrays that belong to a matrix: in codes, and for its activations, which nothing reads
ENDINGS = (
    "",  # a stack of floats
    "_activation_scale",
    "_blocks",
    "_input_scale",
    "_scale",
    "_scale_inv",
    "_scales",
    "_weight_scale",
    "_weight_scale_2",
    "._weight_qdata",
    "._weight_scale",
    "._weight_zero_point",
    ".activation_scale",
    ".g_idx",
    ".input_global_scale",
    ".input_scale",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".q_scale",
    ".qweight",
    ".qzeros",
    ".SCB",
    ".scales",
    ".v_scale",
    ".weight",
    ".weight.absmax",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    ".weight.quant_map",
    ".weight.quant_state.bitsandbytes__fp4",
    ".weight.quant_state.bitsandbytes__nf4",
    ".weight_format",
    ".weight_g_idx",
    ".weight_global_scale",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_shape",
    ".weight_zero_point",
)

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


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix that is still in the files of a checkpoint, where a parameter of a model will be.

    It is read whole. Where its parts have several formats it is a matrix of floats, as `Tensors.matrices` returns it.
    """

    read: Callable[[], Quantized | np.ndarray]
    ndim: int = 2


class Tensors:
    """Give access to the tensors of some files, each safetensors or, by its ending .bin or .pt, written by torch.save.

    Only the headers of the files are read at first. When a tensor is requested, its values are copied in chunks, in the
    requested dtype, into the array that goes to the device; on a CPU that array is used as it is. With a sharding, only
    the part that a device holds is read for it. With `in_parts` nothing is read yet: tensors are given as `Stored`, so
    that the caller, which knows the devices, reads them. Names in the files may lack the prefix "model.", as they do if
    a model was saved without its head.

    With a scheme, a matrix that the files hold in codes is a `Quantized`. With a quantization, each matrix of
    `matrices` is rounded to it when it is read, so that there is no second copy of the weights. Embeddings and heads
    (`table`) are not rounded.

    Args:
        directory: directory of the checkpoint.
        dtype: dtype of the arrays.
        sharding: sharding of the arrays; None is the default device.
        files: the files; None is the files of a model.
        in_parts: whether tensors are given as `Stored`; they are then on the devices of the sharding in the end.
        scheme: how the files store matrices in codes; None: they store floats.
        quantization: "int8", "int4" or "fp8", to which `matrices` are rounded; None for not at all.
        keep_codes: whether matrices in codes are a `Quantized`; otherwise they become the floats for which they stand.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged. The reading methods raise it for a tensor that is missing or has another shape
            than the one requested, a dtype that is not supported, or numbers that are not finite in the requested one.
    """

    def __init__(
        self,
        directory: Path,
        dtype: np.dtype,
        sharding: jax.sharding.Sharding | None = None,
        files: Sequence[Path] | None = None,
        in_parts: bool = False,
        scheme: Scheme | None = None,
        quantization: str | None = None,
        keep_codes: bool = True,
    ):
        self._scheme, self._quantization, self._keep_codes = scheme, quantization, keep_codes
        self._directory, self._dtype, self._sharding, self._in_parts = directory, dtype, sharding, in_parts
        self._paths = {}  # maps the name of a tensor to its file
        self._headers = {}  # maps the name of a tensor to its shape and the name of its dtype
        self._unread = {}  # maps the name of an unread tensor to its number of bytes
        self._advance = lambda num_bytes: None
        self._inside, self._other_names = "model.", {}
        for path in model_files(directory) if files is None else files:
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118, the file is not a dict
                    if name in self._paths:
                        raise ValueError(f"tensor {name} must be in one file, got it in {self._paths[name]} and {path}")
                    entry = file.get_slice(name)
                    self._paths[name] = path
                    self._headers[name] = tuple(entry.get_shape()), entry.get_dtype()
                    self._unread[name] = math.prod(entry.get_shape()) * DTYPES.get(entry.get_dtype(), 1)
        # names that matrices in codes would have as floats, where their codes have others
        self._matrices = {made for name in self._paths if (made := name_of_matrix(name)) not in self._paths}

    def anew(
        self,
        dtype: np.dtype,
        sharding: jax.sharding.Sharding | None = None,
        *,
        in_parts: bool = False,
        quantization: str | None = None,
        keep_codes: bool = True,
    ) -> "Tensors":
        """Return the tensors of the same files for other arrays; this object must have read none of them.

        The headers of the files are not read again.
        """
        other = copy.copy(self)
        other._dtype, other._sharding, other._in_parts = dtype, sharding, in_parts
        other._quantization, other._keep_codes = quantization, keep_codes
        other._unread = dict(self._unread)
        return other

    def rounded(self, number: float) -> float:
        """Return a number with the bits of the dtype of the arrays."""
        return float(np.asarray(number, self._dtype))

    def inside(self, prefix: str) -> "Tensors":
        """Return these tensors, in whose names `prefix` stands where other files have "model."."""
        other = copy.copy(self)
        other._inside = prefix
        return other

    def renamed(self, names: dict[str, str]) -> "Tensors":
        """Return these tensors, in whose names the files may have other parts; `names` maps each part to another."""
        other = copy.copy(self)
        other._other_names = names
        return other

    @property
    def on_one_gpu(self) -> bool:
        """Whether every array, or the part of it that a device works with, is on exactly one GPU."""
        devices = jnp.zeros(()).devices() if self._sharding is None else self._sharding.device_set
        is_whole = self._sharding is None or self._sharding.is_fully_replicated
        return (is_whole or self._in_parts) and all(device.platform == "gpu" for device in devices)

    def __contains__(self, name: str) -> bool:
        return any(candidate in self._matrices for candidate in self._candidates(name)) or self._has(name)

    def _has(self, name: str) -> bool:
        return any(candidate in self._paths for candidate in self._candidates(name))

    def names(self) -> list[str]:
        """Return the names of all tensors, as the files have them, and of matrices in codes as if they were floats."""
        return [*self._paths, *self._matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or of the matrix for which codes stand."""
        linear = self._linear(name, ())
        if name.endswith(".weight") and self._is_quantized(linear):
            assert self._scheme is not None, "only then is a matrix quantised"
            return self._scheme.shape(linear)
        return self._headers[self._find(name)][0]

    def integers(self, name: str, *shape: int) -> np.ndarray:
        """Read a tensor of whole numbers, or of truth values, as it is stored."""
        path = self._paths[self._find(name)]
        with opened(path) as file:
            values = np.asarray(file.get_slice(self._find(name))[:])
        if values.shape != shape or values.dtype.kind not in "iub":
            raise ValueError(
                f"tensor {name} in {path} must be of integers of shape {shape}, got {values.dtype} {values.shape}"
            )
        self._mark_read(name)
        return values

    def numbers(self, name: str) -> np.ndarray:
        """Read a small tensor of any shape as float32."""
        entry = self._entry(self._find(name))
        assert entry is not None, "it was found"
        if entry.kind not in DTYPES:
            raise ValueError(f"{entry.place} must be of type F32, BF16 or F16, got {entry.kind}")
        self._mark_read(name)
        return entry.read().astype(np.float32)

    def table(self, name: str, *shape: int) -> Any:
        """Read a matrix, or another array of two axes or more, as it is stored: [V, D] or `Quantized`."""
        if len(shape) == 2 and name.endswith(".weight") and self._is_quantized(self._linear(name, shape)):
            return self._matrix({name: shape}, transposed=True)
        return self._read({name: shape})

    def floats(self, name: str, *shape: int) -> Any:
        """Read a matrix as it is stored [V, D], and as the floats for which its codes stand where it has codes."""
        other = copy.copy(self)
        other._keep_codes = False
        return other.table(name, *shape)

    def in_float32(self) -> "Tensors":
        """Return the same tensors, which are read as float32 whatever dtype the others have."""
        other = copy.copy(self)
        other._dtype = np.dtype("float32")
        return other

    def vectors(self, sizes: dict[str, int]) -> Array:
        """Read vectors, given their sizes by name, and concatenate them."""
        return self._read({name: (size,) for name, size in sizes.items()})

    def ones(self, size: int) -> Array:
        """Return a vector of ones, which the files do not have."""

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            out[:] = 1

        return self._array(Stored((size,), self._dtype, fill), ())

    def taps(self, names: Sequence[str], channels: int, size: int) -> Array:
        """Read the weights [channels, 1, size] of a short convolution, of which each tensor has some channels.

        transformers writes as many channels to each, whatever they are, so that the sizes say nothing.
        """
        numbers = [next(iter(self.shape(name)), 0) for name in names]
        if sum(numbers) != channels:
            raise ValueError(
                f"tensors {', '.join(names)} in {self._directory} must have {channels} channels, got {sum(numbers)}"
            )
        return self._read({name: (number, 1, size) for name, number in zip(names, numbers, strict=True)})

    def row(self, name: str, *shape: int) -> Array:
        """Read a tensor of this shape, of which one axis alone may be longer than 1, as a vector."""
        self._check(name, shape)
        axis = int(np.argmax(shape))

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            index = tuple(slice(*bounds[0]) if i == axis else slice(1) for i in range(len(shape)))
            self._copy(out.reshape([-1 if i == axis else 1 for i in range(len(shape))]), name, index)

        return self._array(Stored((math.prod(shape),), self._dtype, fill), [name])

    def rows(self, names: Sequence[str], size: int) -> Array:
        """Read vectors of one size as the rows of a table [number of names, size]."""
        for name in names:
            self._check(name, (size,))

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            for i, number in enumerate(range(*bounds[0])):
                self._copy(out[i], names[number], (slice(*bounds[1]),))

        return self._array(Stored((len(names), size), self._dtype, fill), names)

    def matrices(self, inputs: int, outputs: dict[str, int], *, transposed: bool = False) -> Any:
        """Read matrices of one input and concatenate their outputs: [inputs, sum of outputs], or its transpose.

        Matrices that the files hold in codes are a `Quantized`, if all have one format; otherwise they become floats.

        Args:
            inputs: number of inputs of every matrix.
            outputs: number of outputs of each matrix, by name.
            transposed: whether to return [sum of outputs, inputs], which is the orientation in the files.
        """
        shapes = {name: (size, inputs) for name, size in outputs.items()}
        is_rounded = self._quantization is not None and format_of(next(iter(shapes)), inputs, self._quantization)
        if is_rounded or any(self._is_quantized(self._linear(*item)) for item in shapes.items()):
            return self._matrix(shapes, transposed)
        return self._read(shapes, transpose=not transposed)

    def matrix_of_inputs(self, name: str, inputs: int, outputs: int) -> Any:
        """Read a matrix that the files have as [inputs, outputs], and return it so, or as a `Quantized`."""
        linear = self._linear(name, (inputs, outputs))
        if self._is_quantized(linear):
            raise ValueError(
                f"tensor {name} must be floats, because codes of a matrix with its inputs first are not read"
            )
        format = self._quantization and format_of(linear.name, inputs, self._quantization)
        if format is None:
            return self.table(name, inputs, outputs)
        self._check(name, linear.shape)
        return self._placed(lambda: quantize(self._floats([linear]).T, format), [linear])

    def stack(self, inputs: int, matrices: Sequence[dict[str, int]]) -> Any:
        """Read a stack of matrices [E, N, inputs], of which each is as `matrices` reads one, with outputs by name."""
        shapes = [{name: (size, inputs) for name, size in outputs.items()} for outputs in matrices]
        linears = [[self._linear(*item) for item in one.items()] for one in shapes]
        flat = [linear for one in linears for linear in one]
        has_codes = any(map(self._is_quantized, flat))
        if not has_codes:
            for item in (item for one in shapes for item in one.items()):
                self._check(*item)
        if self._quantization or has_codes:
            return self._placed(lambda: self._stacked([self._joined(one, True) for one in linears]), flat, 3)

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            for i, number in enumerate(range(*bounds[0])):
                self._fill(out[i], list(bounds[1:]), shapes[number])

        whole = len(shapes), sum(size for size, _ in shapes[0].values()), inputs
        return self._array(Stored(whole, self._dtype, fill), [linear.name + ".weight" for linear in flat])

    def stacked(self, name: str, *shape: int, transposed: bool = False) -> Any:
        """Read a stack of matrices [E, N, K] that the files have as one tensor, with its inputs first if `transposed`.

        The name is the tensor's own, which has no ending in most families.
        """
        linear = replace(self._linear(name, shape), inputs_first=transposed)
        if self._scheme is not None and self._is_quantized(linear):
            if not reads_stack(self._scheme, linear):
                raise ValueError(
                    f"tensor {name} must be floats, because codes of a stack of experts in this format and this order "
                    "of its axes are not read"
                )
            return self._placed(lambda: self._kept(linear), [linear], 3)
        number, outputs, inputs = shape
        self._check(name, (number, inputs, outputs) if transposed else shape)

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            _, rows, columns = (slice(*bound) for bound in bounds)
            for i, expert in enumerate(range(*bounds[0])):
                at = columns if transposed else rows
                for part in _chunks(at.start, at.stop, (rows if transposed else columns).stop):
                    here = slice(part.start - at.start, part.stop - at.start)
                    one = slice(expert, expert + 1)
                    if transposed:
                        self._copy(out[i, :, here].T, name, (one, part, rows))
                    else:
                        self._copy(out[i, here], name, (one, part, columns))

        stored = Stored(shape, self._dtype, fill)
        if self._quantization is None:
            return self._array(stored, [name])
        self._mark_read(name)
        return self._placed(lambda: self._rounded(stored), [linear], 3)

    def side_by_side(self, rows: int, sizes: dict[str, int]) -> Any:
        """Read tables of the same rows, with sizes by name, and put them side by side: [rows, sum of sizes]."""
        for name, size in sizes.items():
            self._check(name, (rows, size))

        def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
            (first, last), offset = bounds[1], 0
            for name, size in sizes.items():
                start, stop = max(first - offset, 0), min(last - offset, size)
                if start < stop:
                    here = slice(start + offset - first, stop + offset - first)
                    self._copy(out[:, here], name, (slice(*bounds[0]), slice(start, stop)))
                offset += size

        return self._array(Stored((rows, sum(sizes.values())), self._dtype, fill), sizes)

    def check_same(self, name: str, other: str, *shape: int) -> None:
        """Raise ValueError if the files hold the tensor `name` and it differs from the tensor `other`."""
        if name not in self:
            return
        if self._is_quantized(self._linear(name, shape)):
            raise ValueError(
                f"tie_word_embeddings in config.json must be false where {name} has codes, as in {self._directory}: "
                f"it is then not tied to {other}"
            )
        self._check(name, shape)
        for rows in _chunks(0, shape[0], math.prod(shape[1:])):
            if not np.array_equal(self._read_slice(name, rows), self._read_slice(other, rows)):
                path = self._paths[self._find(name)]
                raise ValueError(f"tensor {name} in {path} must equal {other}, which it is tied to")
        self._mark_read(name)

    def check_all_read(self, *ignored: str) -> None:
        """Raise ValueError for a tensor that has not been read, unless its name matches a pattern in `ignored`."""
        unneeded = () if self._scheme is None else self._scheme.unneeded
        for name in self._unread:
            if self._scheme is not None and name.endswith(".bias") and not self._read_slice(name, slice(None)).any():
                continue  # some tools write a bias of zeros beside every matrix
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in (*ignored, *unneeded)):
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

    def _linear(self, name: str, shape: tuple[int, ...]) -> StoredLinear:
        """Return the stored parts of the matrix of a tensor, whose name ends in ".weight"."""
        return StoredLinear(name.removesuffix(".weight"), shape, self._entry, self._dtype)

    def _entry(self, name: str) -> StoredArray | None:
        if not self._has(name):
            return None
        name = self._find(name)
        shape, kind = self._headers[name]
        return StoredArray(self._paths[name], name, shape, kind, lambda num_bytes: self._advance(num_bytes))

    def _is_quantized(self, linear: StoredLinear) -> bool:
        return self._scheme is not None and self._scheme.is_quantized(linear)

    def _matrix(self, shapes: dict[str, tuple[int, ...]], transposed: bool) -> Any:
        """Return quantised matrices of one input as one, in the files still or on its devices."""
        linears = [self._linear(*item) for item in shapes.items()]
        if not any(map(self._is_quantized, linears)):
            for item in shapes.items():
                self._check(*item)
        return self._placed(lambda: self._joined(linears, transposed), linears)

    def _placed(
        self, read: Callable[[], Quantized | np.ndarray], linears: Sequence[StoredLinear], ndim: int = 2
    ) -> Any:
        """Return a matrix or a stack of these, in the files still or on its devices."""
        stored = StoredMatrix(read, ndim)
        matrix = stored
        if not self._in_parts:
            matrix = stored.read()
            matrix = jax.device_put(matrix) if self._sharding is None else put(matrix, self._sharding)
        for linear in linears:
            names = self._candidates(linear.name)
            self._mark_all_read(tuple(f"{name}{end}" for name in names for end in ENDINGS))
        return matrix

    def _stacked(self, matrices: Sequence[Quantized | np.ndarray]) -> Quantized | np.ndarray:
        """Stack matrices [N, K]; they become floats where their formats differ."""
        codes = [one for one in matrices if isinstance(one, Quantized)]
        if len(codes) == len(matrices):
            with contextlib.suppress(ValueError):
                return stack(codes)
        floats = [dequantize(one, self._dtype) if isinstance(one, Quantized) else one for one in matrices]
        return np.stack([np.asarray(one) for one in floats])

    def _kept(self, linear: StoredLinear) -> Quantized | np.ndarray:
        """Read a stack of matrices that the files have in codes."""
        assert self._scheme is not None, "only then is a matrix quantised"
        codes = _named(linear, self._scheme.read)
        return codes if self._keep_codes else np.asarray(dequantize(codes, self._dtype))

    def _rounded(self, stored: Stored) -> Quantized:
        """Read a stack of matrices of floats, one after the other, and round each."""
        assert self._quantization is not None, "only then are floats rounded"
        codes = []
        for i in range(stored.shape[0]):
            one = np.empty((1, *stored.shape[1:]), self._dtype)
            stored.fill(one, [(i, i + 1), (0, stored.shape[1]), (0, stored.shape[2])])
            codes.append(quantize(one[0], self._quantization))
        return stack(codes)

    def _joined(self, linears: list[StoredLinear], transposed: bool) -> Quantized | np.ndarray:
        """Read matrices of one input, and return one matrix with their outputs."""
        parts = self._parts(linears)
        codes = [part for part in parts if isinstance(part, Quantized)]
        if self._keep_codes and len(codes) == len(parts):
            with contextlib.suppress(ValueError):  # formats or orders of inputs differ: they become floats
                return concatenate(codes)
        if self._keep_codes:
            logger.info("%s: of several formats, read as %s", ", ".join(one.name for one in linears), self._dtype.name)
        return np.asarray(_joined_floats(parts, self._dtype, transposed))

    def _parts(self, linears: list[StoredLinear]) -> list[Quantized | Array]:
        """Read matrices of one input, each as the files hold it, or all as one of floats or one that is rounded."""
        if not any(map(self._is_quantized, linears)):
            floats, quantization = self._floats(linears), self._quantization
            format = quantization and format_of(linears[0].name, linears[0].shape[1], quantization)
            return [floats if format is None else quantize(floats, format)]
        scheme = self._scheme
        assert scheme is not None, "only then is a matrix quantised"
        return [_named(one, scheme.read) if self._is_quantized(one) else self._floats([one]) for one in linears]

    def _floats(self, linears: list[StoredLinear]) -> Array:
        """Read matrices of floats [N, K] and concatenate their outputs, on the default device."""
        whole = copy.copy(self)
        whole._sharding, whole._in_parts = None, False
        return whole._read({f"{linear.name}.weight": linear.shape for linear in linears})

    def _mark_all_read(self, names: tuple[str, ...]) -> None:
        """Count as read all tensors with these names, of which the files may have some."""
        for name in names:
            self._unread.pop(name, None)

    def _candidates(self, name: str) -> tuple[str, ...]:
        """Return the names that a tensor may have in the files."""
        other = name
        for part, in_files in self._other_names.items():
            other = other.replace(part, in_files)
        return self._with_prefixes(name) if other == name else (*self._with_prefixes(name), *self._with_prefixes(other))

    def _with_prefixes(self, name: str) -> tuple[str, ...]:
        """Return a name with the prefixes that it may have in the files."""
        own = name.removeprefix("model.")
        if self._inside == "model.":
            return name, own
        inside = self._inside if own != name else self._inside.removesuffix("model.")  # a head stands beside the model
        return f"{inside}{own}", name, own

    def _find(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        for candidate in self._candidates(name):
            if candidate in self._paths:
                return candidate
            if candidate in self._matrices:
                raise ValueError(
                    f"tensor {candidate} is in codes in {self._directory}, so that quantization_config in config.json "
                    "must say how, got a config that does not"
                )
        raise ValueError(f"tensor {name} is missing from {self._directory}")

    def _mark_read(self, name: str) -> None:
        self._unread.pop(self._find(name), None)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the stored tensor has this shape and a supported dtype."""
        name = self._find(name)
        path, (stored, dtype) = self._paths[name], self._headers[name]
        if stored != shape:
            raise ValueError(f"tensor {name} in {path} must have shape {shape}, got {stored}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} in {path} must be of type F32, BF16 or F16, got {dtype}")

    def _read_slice(self, name: str, index: slice | tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a stored tensor.

        The file is opened for this call alone, so that its mapped pages do not add up in memory.
        """
        name = self._find(name)
        with opened(self._paths[name]) as file:
            values = file.get_slice(name)[index]
        self._advance(values.nbytes)
        return values

    def _copy(self, out: np.ndarray, name: str, index: tuple[slice, ...]) -> None:
        """Write to `out` a slice of a stored tensor, whose numbers must be finite in the dtype of the arrays."""
        values = self._read_slice(name, index).reshape(out.shape)
        for rows in _chunks(0, len(values), math.prod(values.shape[1:]), BLOCK_BYTES):
            with np.errstate(over="ignore"):
                block = values[rows].astype(out.dtype, copy=False)
            if not _are_finite(block):
                raise ValueError(
                    f"tensor {name} in {self._paths[self._find(name)]} must have finite numbers of {out.dtype.name}, "
                    "got NaN, infinity or a number out of its range"
                )
            out[rows] = block

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

        return self._array(Stored(whole[::-1] if transpose else whole, self._dtype, fill), shapes)

    def _array(self, stored: Stored, names: Iterable[str]) -> Any:
        """Return an array of floats, in the files still or on its devices."""
        array = stored if self._in_parts else place(stored, self._sharding)
        for name in names:
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
                here = slice(rows.start + offset - first, rows.stop + offset - first)
                self._copy(out[here], name, (rows, *columns))
            offset += shape[0]


@partial(jax.jit, static_argnums=(1, 2))
def _joined_floats(parts: list[Quantized | Array], dtype: np.dtype, transposed: bool) -> Array:
    """Return matrices [N, K] of one input as one of floats, [K, sum of N] or its transpose."""
    whole = jnp.concatenate([dequantize(one, dtype) if isinstance(one, Quantized) else one for one in parts])
    return whole if transposed else whole.T


def _named(linear: StoredLinear, read: Callable[[StoredLinear], Quantized]) -> Quantized:
    """Read a matrix; an error that does not name it does so."""
    try:
        return linear.check(read(linear))
    except ValueError as error:
        if linear.name in str(error):
            raise
        raise ValueError(f"the quantised matrix {linear.name}: {error}") from error


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


def _chunks(begin: int, end: int, width: int, num_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Return the rows [begin, end) as slices of at most `num_bytes` each, but at least one row."""
    step = max(1, num_bytes // (4 * max(1, width)))
    return (slice(row, min(row + step, end)) for row in range(begin, end, step))


def _are_finite(values: np.ndarray) -> bool:
    """Return whether floats are neither infinite nor NaN.

    These have the largest bits, as whole numbers, of floats with their sign. So two maxima tell it, without a copy.
    """
    bits = 8 * values.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{values.itemsize}"))
    positive, negative = values.view(f"i{values.itemsize}"), values.view(f"u{values.itemsize}")
    return bool(positive.max(initial=0) < infinity and negative.max(initial=0) < infinity + (1 << bits - 1))


def _aligned_empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose memory is aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
