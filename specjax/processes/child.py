"""Other Python processes that this one starts for work of its own, and the frames of bytes that they are sent.

A frame is its length in 8 bytes, then that many bytes.
"""

import os
import struct
import subprocess
import sys
from typing import IO, Any

LENGTH = struct.Struct("<Q")  # bytes of a frame


def start_child(module: str, *arguments: str, **options: Any) -> subprocess.Popen:
    """Start `main` of a module in another process, which leaves the devices alone.

    Args:
        module: name of the module.
        *arguments: what its `sys.argv` has after the first.
        **options: those of `subprocess.Popen`.
    """
    paths = [path or os.getcwd() for path in sys.path]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    return subprocess.Popen(command, env=environment, **options)


def frame(data: bytes) -> bytes:
    """Return a frame with this content."""
    return LENGTH.pack(len(data)) + data


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write a frame."""
    file.write(frame(data))
    file.flush()


def read_frame(file: IO[bytes]) -> bytes:
    """Read a frame.

    Raises:
        EOFError: the file ends before it.
    """
    header = file.read(LENGTH.size)
    data = file.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""
    if len(header) < LENGTH.size or len(data) < LENGTH.unpack(header)[0]:
        raise EOFError("the other process has ended")
    return data
