"""The packages that the extras of specjax bring, and the command that installs those that are missing."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
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


def extras(*, only_missing: bool = True) -> dict[str, list[str]]:
    """Return for each extra of specjax its requirements, also by way of the extras that it includes.

    Args:
        only_missing: whether to leave out the requirements whose packages are installed.
    """
    given = _requirements()

    def of(name: str) -> list[str]:
        own = re.compile(r"specjax\[(.*)\]")
        parts = [(own.match(text), text) for text in given.get(name, ())]
        return [item for inner, text in parts for item in ([text] if inner is None else _all(inner[1].split(",")))]

    def _all(names: list[str]) -> list[str]:
        return [item for name in names for item in of(name)]

    return {name: [text for text in of(name) if not (only_missing and _is_installed(text))] for name in given}


def _requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra as they are written, from the checkout or from the metadata."""
    if (ROOT / "pyproject.toml").is_file():
        return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    try:
        return _by_extra(metadata.distribution("specjax").requires or [])
    except metadata.PackageNotFoundError:
        return {}


def _by_extra(requirements: list[str]) -> dict[str, list[str]]:
    """Return the requirements of each extra, from a distribution's requirements with their markers."""
    found: dict[str, list[str]] = {}
    for text in requirements:
        of_extra = re.search(r"""extra == ['"]([\w-]+)['"]""", text)
        if of_extra:
            found.setdefault(of_extra[1], []).append(text.partition(";")[0].strip())
    return found


def requirement(text: str) -> tuple[str, str | None]:
    """Return the package of a requirement, and the oldest version that it takes, None for any version."""
    name, least = re.match(r"[\w.-]+", text), re.search(r">=\s*([\w.]+)", text)
    return name[0] if name else text, least[1] if least else None


def _is_installed(text: str) -> bool:
    """Return whether a requirement's package is installed, and the packages of the package's extras that it names."""
    try:
        own = metadata.distribution(requirement(text)[0])
    except metadata.PackageNotFoundError:
        return False
    named = re.match(r"[\w.-]+\[(.*?)\]", text)
    wanted = _by_extra(own.requires or [])
    return named is None or all(_is_installed(t) for name in named[1].split(",") for t in wanted.get(name, ()))


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
    wanted = extras().get(extra) or [package]
    return " ".join([installer(), *(f'"{text}"' for text in wanted)])


def _source(url: str) -> Path | None:
    """Return the folder or the wheel that specjax runs or was installed from, None where it is not on this machine."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT
    path = Path(url2pathname(urlsplit(url).path))
    return path if url.startswith("file:") and path.exists() else None


def installer() -> str:
    """Return the beginning of a command that installs packages for this interpreter."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    pip = shutil.which("pip")
    is_own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return "pip install" if is_own else f"{python} -m pip install"
