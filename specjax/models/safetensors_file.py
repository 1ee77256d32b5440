"""Read arrays of a safetensors file in all dtypes, some of which the package safetensors does not give to NumPy."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}


def read_array(path: Path, name: str) -> np.ndarray:
    """Return an array of a file whose header the package safetensors has checked.

    Args:
        path: the file.
        name: name of an array in it, of one of DTYPES.
    """
    start, entry = read_header(path)[name]
    dtype, (first, last) = DTYPES[entry["dtype"]], entry["data_offsets"]
    flat = np.fromfile(path, dtype, count=(last - first) // dtype.itemsize, offset=start + first)
    return flat.reshape(entry["shape"])


def read_header(path: Path) -> dict[str, tuple[int, Any]]:
    """Return by the name of each array where the arrays of the file begin, and the array's entry in the header."""
    return _header(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _header(path: Path, changed: int) -> dict[str, tuple[int, Any]]:
    """Read the header of a file that was changed at this time."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: (8 + size, entry) for name, entry in header.items() if name != "__metadata__"}
