"""Read the header of a GGUF file: its fields, and where its tensors are. Every size is checked against the file."""

import math
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.diagnosis import check_not_pointer

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MAX_AXES = 4
ALIGNMENT = 32  # of tensors, in bytes, unless a field says otherwise
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # the name of a file that has a part of a model


@dataclass(frozen=True)
class Kind:
    """A type of tensors."""

    name: str
    block: int  # numbers in a block
    size: int  # bytes of a block


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
}
NUMBERS = {kind.name: number for number, kind in KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]  # as NumPy has it: the last axis is contiguous
    kind: Kind
    path: Path  # of the file that has it
    start: int  # of its bytes in the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.kind.block * self.kind.size


@dataclass(frozen=True)
class Header:
    """The fields and the tensors of a model: of a file, or of several that each have a part of its tensors."""

    path: Path  # of the file, or of the first part, which has the fields
    fields: dict[str, Any]  # by name: numbers, truth values, strings, and lists of these
    tensors: dict[str, Entry]  # by name

    def bytes_of(self, entry: Entry) -> np.ndarray:
        """Return the bytes of a tensor [rows, bytes of a row], which are read when they are used."""
        row = entry.shape[-1] // entry.kind.block * entry.kind.size
        shape = entry.num_bytes // row, row
        return np.memmap(entry.path, np.uint8, mode="r", offset=entry.start, shape=shape)


class _Reader:
    """Reads values one after the other."""

    def __init__(self, path: Path, content: memoryview):
        self.path, self.content, self.position = path, content, 0

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} must be a whole GGUF file, copy it anew: {what}")

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.position:
            raise self.damaged(f"its header asks for {size} bytes at {self.position}, of {len(self.content)}")
        self.position += size
        return self.content[self.position - size : self.position].tobytes()

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        content = self.take(self.number("<Q"))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int, name: str) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damaged(f"the field {name} has the unknown type {kind}")
        kind, size = self.number("<I"), self.number("<Q")
        if kind == STRING:
            if 8 * size > len(self.content) - self.position:
                raise self.damaged(f"the field {name} has {size} strings, more than the file can hold")
            return [self.text() for _ in range(size)]
        if kind not in SCALARS:
            raise self.damaged(f"the field {name} is a list of the unknown type {kind}")
        form = SCALARS[kind]
        values = np.frombuffer(self.take(size * struct.calcsize(form)), np.dtype(form.replace("?", "b1")))
        return values.tolist()


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file, or of all files of a model whose first part this is.

    Raises:
        FileNotFoundError: there is no such file, or a part of the model is missing.
        ValueError: a file is damaged, has tensors of unknown types, or is a later part of a model.
    """
    header = _header(path)
    count = header.fields.get("split.count", 1)
    if type(count) is not int:
        raise ValueError(f"split.count in {path} must be a number of files, got {count!r}")
    if count in (0, 1):
        return header
    named, number = PART.fullmatch(path.name), header.fields.get("split.no")
    if number != 0 or named is None or (int(named[2]), int(named[3])) != (1, count):
        raise ValueError(
            f"{path} must be the first part of its model, in a file named NAME-00001-of-{count:05d}.gguf, "
            f"got part {number} (from 0) of {count}"
        )
    tensors = dict(header.tensors)
    for i in range(1, count):
        part = _header(path.with_name(f"{named[1]}-{i + 1:05d}-of-{count:05d}.gguf"))
        got = part.fields.get("split.no"), part.fields.get("split.count")
        if got != (i, count):
            raise ValueError(f"{part.path} must be part {i} (from 0) of {count}, got part {got[0]} of {got[1]}")
        if twice := tensors.keys() & part.tensors.keys():
            raise ValueError(f"the parts of {path} must each have other tensors, got {min(twice)} twice")
        tensors |= part.tensors
    expected = header.fields.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ValueError(f"the parts of {path} must have {expected} tensors together, got {len(tensors)}")
    return replace(header, tensors=tensors)


def _header(path: Path) -> Header:
    """Return the header of one file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a GGUF file, and there is no such file")
    check_not_pointer(path)
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)  # a tokenizer is long, and a model may have many parts
def _read(path: Path, changed: int, size: int) -> Header:
    """Read the header of a file of this time and size."""
    if size < 24:
        raise ValueError(f"{path} must be a GGUF file, got a file of {size} bytes")
    reader = _Reader(path, np.memmap(path, np.uint8, mode="r").data)  # its slices are quicker than NumPy's
    if reader.take(4) != b"GGUF":
        raise ValueError(f"{path} must be a GGUF file, which begins with GGUF, got {reader.content[:4].tobytes()!r}")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"{path} must be of version 2 or 3 of GGUF and little-endian, got version {version}")
    num_tensors, num_fields = reader.number("<Q"), reader.number("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.text()
        if name in fields:
            raise reader.damaged(f"it has the field {name} twice")
        fields[name] = reader.value(reader.number("<I"), name)
    found = [_entry(reader) for _ in range(num_tensors)]
    return Header(path, fields, _placed(reader, found, fields))


def _entry(reader: _Reader) -> Entry:
    """Read where a tensor is; its start is still that within the part of the file that holds tensors."""
    name, num_axes = reader.text(), reader.number("<I")
    if not 1 <= num_axes <= MAX_AXES:
        raise reader.damaged(f"the tensor {name} has {num_axes} axes")
    shape = tuple(reader.number("<Q") for _ in range(num_axes))[::-1]
    number, start = reader.number("<I"), reader.number("<Q")
    if number not in KINDS:
        known = ", ".join(NUMBERS)
        raise ValueError(f"tensor {name} in {reader.path} must be of type {known}, got type {number} of GGUF")
    kind = KINDS[number]
    if 0 in shape or math.prod(shape) > 2**40 or shape[-1] % kind.block:
        raise reader.damaged(f"the tensor {name} of {kind.name} has the shape {shape}")
    return Entry(name, shape, kind, reader.path, start)


def _placed(reader: _Reader, found: list[Entry], fields: dict[str, Any]) -> dict[str, Entry]:
    """Return tensors by name with their places in the file."""
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.damaged(f"general.alignment is {alignment!r}")
    first, size = -(-reader.position // alignment) * alignment, len(reader.content)
    placed: dict[str, Entry] = {}
    for entry in found:
        entry = replace(entry, start=first + entry.start)
        if entry.name in placed:
            raise reader.damaged(f"it has the tensor {entry.name} twice")
        if entry.start % alignment or entry.start + entry.num_bytes > size:
            end = entry.start + entry.num_bytes
            raise reader.damaged(f"the tensor {entry.name} is at bytes {entry.start} to {end}, of {size}")
        placed[entry.name] = entry
    return placed
