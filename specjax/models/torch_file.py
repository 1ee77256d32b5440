"""Read the tensors of a file that `torch.save` wrote, without running anything in it.

Such a file is a zip archive with one entry for each storage, an array of numbers, and a pickle that says which tensors
lie in which storage. A pickle is a program that can call any function. Here it is interpreted by a stack machine that
knows the operations for a dictionary of tensors, and that refuses everything else.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {  # name in safetensors and dtype of each kind of storage
    "torch DoubleStorage": ("F64", np.dtype(np.float64)),
    "torch FloatStorage": ("F32", np.dtype(np.float32)),
    "torch HalfStorage": ("F16", np.dtype(np.float16)),
    "torch BFloat16Storage": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "torch LongStorage": ("I64", np.dtype(np.int64)),
    "torch IntStorage": ("I32", np.dtype(np.int32)),
    "torch ShortStorage": ("I16", np.dtype(np.int16)),
    "torch CharStorage": ("I8", np.dtype(np.int8)),
    "torch ByteStorage": ("U8", np.dtype(np.uint8)),
    "torch BoolStorage": ("BOOL", np.dtype(np.bool_)),
}
_DICT, _TENSOR, _PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
_HEADER_SIZE = 30  # bytes of an entry's header in a zip archive, before its name


class _Global(NamedTuple):
    """The name of something that the pickle refers to; it is never imported."""

    name: str


class _Storage(NamedTuple):
    kind: str  # a key of DTYPES
    key: str  # name of the entry
    size: int  # count of numbers


class _View(NamedTuple):
    """A tensor: where its numbers are in a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Slice:
    """A stored tensor, of which `[index]` reads a part. It has the interface of safetensors."""

    def __init__(self, path: Path, name: str, view: _View, start: int):
        self._path, self._name, self._view, self._start = path, name, view, start

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._view.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as safetensors has it."""
        return DTYPES[self._view.storage.kind][0]

    def __getitem__(self, index: Any) -> np.ndarray:
        view, dtype = self._view, DTYPES[self._view.storage.kind][1]
        numbers = np.memmap(self._path, dtype, mode="r", offset=self._start, shape=(max(1, view.storage.size),))
        strides = [stride * dtype.itemsize for stride in view.strides]
        whole = np.lib.stride_tricks.as_strided(numbers[view.offset :], view.shape, strides, writeable=False)
        return np.array(whole[index])


class TorchFile:
    """The tensors of an open file by name. It has the interface of `safetensors.safe_open`."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if "data.pkl" not in entries:
            raise ValueError(f"{path} must be a file that torch.save wrote, got a zip archive without data.pkl")
        order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
        if order != b"little":
            raise ValueError(f"{path} must hold numbers in little-endian order, got {order!r}")
        content = _interpret(archive.read(entries["data.pkl"]), path)
        if not isinstance(content, dict) or not all(isinstance(value, _View) for value in content.values()):
            raise ValueError(f"{path} must hold a dictionary of tensors by name, got something else")
        self._path, self._entries, self._views = path, entries, content

    def keys(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self._views)

    def get_slice(self, name: str) -> Slice:
        """Return the tensor of this name, of which nothing is read yet."""
        view = self._views[name]
        entry = self._entries.get(f"data/{view.storage.key}")
        num_bytes = view.storage.size * DTYPES[view.storage.kind][1].itemsize
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < num_bytes:
            found = "no such entry" if entry is None else f"{entry.file_size} bytes of an entry"
            raise ValueError(f"tensor {name} in {self._path} must have {num_bytes} bytes, not compressed, got {found}")
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if math.prod(view.shape) and last >= view.storage.size:
            raise ValueError(f"tensor {name} in {self._path} must lie in its storage, got {view}")
        with self._path.open("rb") as file:
            file.seek(entry.header_offset)
            header = file.read(_HEADER_SIZE)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return Slice(self._path, name, view, entry.header_offset + _HEADER_SIZE + lengths)


@contextmanager
def open_torch_file(path: Path) -> Iterator[TorchFile]:
    """Open a file that `torch.save` of torch 1.6 or later wrote. Nothing in it is run.

    Raises:
        ValueError: the file is damaged, or it holds anything but a dictionary of tensors.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} must be a whole zip archive, as torch.save writes it since torch 1.6")
    try:
        with zipfile.ZipFile(path) as archive:
            yield TorchFile(path, archive)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} must be a whole zip archive, as torch.save writes it: {error}") from error


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack machine of a pickle, with the operations that a dictionary of tensors needs."""

    def __init__(self):
        self.stack, self.marks, self.memo = [], [], {}
        self.operations: dict[str, Callable[[Any], Any]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "TUPLE": lambda _: self.stack.append(tuple(self._since_mark())),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "BINGET": lambda index: self.stack.append(self.memo[index]),
            "LONG_BINGET": lambda index: self.stack.append(self.memo[index]),
            "GLOBAL": lambda name: self.stack.append(_global(name)),
            "STACK_GLOBAL": lambda _: self.stack.append(_global(" ".join(self._pop(2)))),
            "SETITEM": lambda _: self._set_items(self._pop(2)),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "APPEND": lambda _: self._extend(self._pop(1)),
            "BUILD": lambda _: self._pop(1),  # attributes of a dictionary
            "BINPERSID": lambda _: self.stack.append(_storage(*self._pop(1))),
            "REDUCE": lambda _: self.stack.append(_call(*self._pop(2))),
        }

    def run(self, name: str, argument: Any) -> None:
        """Run one operation, which is not STOP."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in self.operations:
            self.operations[name](argument)
        else:
            raise ValueError(f"the operation {name}")

    def _pop(self, count: int) -> list:
        if len(self.stack) < count:
            raise ValueError("an operation without its operands")
        popped = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return popped

    def _since_mark(self) -> list:
        start = self.marks.pop()
        return self._pop(len(self.stack) - start)

    def _remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _set_items(self, items: list) -> None:
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _extend(self, items: list) -> None:
        self.stack[-1].extend(items)


def _interpret(program: bytes, path: Path) -> Any:
    """Return the object that a pickle builds; raise ValueError for operations that a dictionary of tensors lacks."""
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(program):
            if operation.name == "STOP":
                return machine.stack.pop()
            machine.run(operation.name, argument)
        raise ValueError("no end")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold tensors alone and no calls, got {error}") from error


def _global(name: str) -> _Global:
    if name not in (_DICT, _TENSOR, _PARAMETER, *DTYPES):
        raise ValueError(f"a reference to {name.replace(' ', '.', 1)}")
    return _Global(name)


def _storage(reference: Any) -> _Storage:
    kind, (storage, key, _, size) = reference[0], reference[1:]
    if kind != "storage" or not isinstance(storage, _Global) or storage.name not in DTYPES:
        raise ValueError(f"a reference to {reference!r}")
    if not (isinstance(key, str) and type(size) is int and size >= 0):
        raise ValueError(f"a storage {reference!r}")
    return _Storage(storage.name, key, size)


def _call(function: Any, arguments: tuple) -> Any:
    """Return the result of one of three known functions: an empty dictionary, or a tensor."""
    name = function.name if isinstance(function, _Global) else None
    if name == _DICT and not arguments:
        return {}
    if name == _PARAMETER and isinstance(arguments[0], _View):
        return arguments[0]
    if name != _TENSOR:
        raise ValueError(f"a call of {function!r}")
    storage, offset, shape, strides = arguments[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a tensor {arguments!r}")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {shape!r} and strides {strides!r}")
    return _View(storage, offset, tuple(shape), tuple(strides))
