"""The packages that the extras of specjax bring, and the command that installs those that are missing."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).parents[2]  # the checkout, or the folder where packages are installed


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Let the error of an import that fails name the command that installs the extra.

    Args:
        extra: the extra that brings the packages which the body of the `with` imports.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        message = f"the package {package} is missing, install it with: {install_command(extra, package)}"
        raise ModuleNotFoundError(message, name=package) from error


def install_command(extra: str, package: str) -> str:
    """Return the command that installs an extra where specjax is installed.

    A checkout, a folder or a wheel that specjax was installed from is named by its path. Elsewhere the command names
    the packages of the extra that are missing, because no index need know specjax.

    Args:
        extra: one of the extras in pyproject.toml.
        package: the package that was missing, for a copy of specjax without metadata.
    """
    try:
        own = metadata.distribution("specjax")
    except metadata.PackageNotFoundError:
        own = None
    url = json.loads((own and own.read_text("direct_url.json")) or "{}")
    source = _source(url.get("url", ""))
    if source is not None:
        editable = "-e " if url.get("dir_info", {}).get("editable") else ""
        return f'{installer()} {editable}"{source}[{extra}]"'
    wanted = [] if own is None else _missing(own.requires or [], extra)
    return " ".join([installer(), *(f'"{requirement}"' for requirement in wanted or [package])])


def _source(url: str) -> Path | None:
    """Return the folder or the wheel that specjax runs or was installed from, None where it is not on this machine."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT
    path = Path(url2pathname(urlsplit(url).path))
    return path if url.startswith("file:") and path.exists() else None


def _missing(requirements: list[str], extra: str) -> list[str]:
    """Return the requirements of an extra whose packages are not installed."""
    missing = []
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        name = re.match(r"[\w.-]+", text)
        if name and re.search(rf"""extra == ['"]{extra}['"]""", marker):
            try:
                metadata.version(name[0])
            except metadata.PackageNotFoundError:
                missing.append(text.strip())
    return missing


def installer() -> str:
    """Return the beginning of a command that installs packages for this interpreter."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    pip = shutil.which("pip")
    is_own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return "pip install" if is_own else f"{python} -m pip install"
