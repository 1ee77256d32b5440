"""Other Python processes that this one starts for separate work, and the frames of bytes that they are sent.

A frame is its length in 8 bytes, then that many bytes.
"""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

LENGTH = struct.Struct("<Q")  # bytes of a frame


def start_child(module: str, *arguments: str, **options: Any) -> subprocess.Popen:
    """Start `main` of a module in another process, which leaves the devices alone.

    Args:
        module: name of the module.
        *arguments: entries of its `sys.argv` after the first.
        **options: options of `subprocess.Popen`.
    """
    command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    return subprocess.Popen(command, env=_environment(), **options)


def start_script(path: Path, **options: Any) -> subprocess.Popen:
    """Start another process that runs a file, without its folder among the folders of modules.

    Args:
        path: the file.
        **options: options of `subprocess.Popen`.
    """
    return subprocess.Popen([sys.executable, "-P", str(path)], env=_environment(), **options)


def _environment() -> dict[str, str]:
    """Return the environment of a process that finds the modules that this one finds, and leaves the devices alone."""
    paths = [path or os.getcwd() for path in sys.path]
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}


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
