"""Files as torch.save writes them, without torch: a zip archive with a pickle, operation by operation."""

import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


def text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def symbol(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def tuple_of(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def tensor(key: str, array: np.ndarray, size: int | None = None) -> bytes:
    """A contiguous tensor in the storage `key`, which claims to hold `size` numbers."""
    strides = [stride // array.itemsize for stride in array.strides]
    storage = [text("storage"), symbol("torch", STORAGES[array.dtype]), text(key), text("cpu")]
    parts = [
        tuple_of(*storage, number(array.size if size is None else size)) + pickle.BINPERSID,
        number(0),
        tuple_of(*map(number, array.shape)),
        tuple_of(*map(number, strides)),
        pickle.NEWFALSE,
        symbol("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    ]
    return symbol("torch._utils", "_rebuild_tensor_v2") + tuple_of(*parts) + pickle.REDUCE


def dictionary(items: dict[str, bytes]) -> bytes:
    body = b"".join(text(name) + value + pickle.SETITEM for name, value in items.items())
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + body + pickle.STOP


def write(path, tensors: dict[str, np.ndarray], program: bytes | None = None) -> None:
    """Write tensors to a file; a program replaces the pickle that names them."""
    stored = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if program is None:
        program = dictionary({name: tensor(str(i), array) for i, (name, array) in enumerate(stored.items())})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for i, array in enumerate(stored.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())
