"""Facts about a machine for `specjax doctor`: versions, devices, memory, and the folder of compiled programs."""

import os
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.engine import compilation_cache
from specjax.validation.extras import extras, install_command, requirement

PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")  # have jaxlib's version
LEAST_CAPABILITY = 8.0  # of NVIDIA GPUs on which the kernels run as measured
LEAST_MEMORY, LEAST_SHARE = 1e9, 0.25  # bytes of the host, and share of a GPU, that should be free
LEAST_DISK = 1e9  # bytes that should be free where compiled programs are kept


class Problem(NamedTuple):
    """Something that is wrong on this machine."""

    cause: str
    remedy: str


def versions(problems: list[Problem]) -> dict[str, str]:
    """Return the versions of the packages that always run, and note installed packages that are too old."""
    found = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    for plugin in PLUGINS:
        version = _version(plugin)
        if version is not None and version != found["jaxlib"]:
            remedy = f"install the same version of both: {install_command('cuda', 'jax[cuda13]')}"
            problems.append(Problem(f"{plugin} {version} does not belong to jaxlib {found['jaxlib']}", remedy))
    for name, least in _too_old():
        problems.append(Problem(f"{name} {_version(name)} is older than {least}", f"install {name}>={least}"))
    own = _version("specjax") or "without metadata"
    system = f"{platform.system()} {platform.machine()}"
    return {"specjax": own, **found, "Python": platform.python_version(), "on": system}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _too_old() -> list[tuple[str, str]]:
    """Return installed packages of the extras that are older than the extras ask for, with the oldest that will do."""
    found: dict[str, str] = {}
    for wanted in extras(only_missing=False).values():
        for text in wanted:
            name, least = requirement(text)
            version = _version(name)
            if version is not None and least is not None and _numbers(version) < _numbers(least):
                found[name] = least
    return list(found.items())


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    parts = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def devices(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return the devices of JAX, and note a GPU that JAX does not use."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        first = str(error).splitlines()[0]
        remedy = f"unset JAX_PLATFORMS (now {asked!r}), or install the plugin of the platform that it names"
        problems.append(Problem(f"JAX finds no device: {first}", remedy))
        return []
    platforms = {device.platform for device in found}
    if platforms == {"cpu"} and "cpu" not in os.environ.get("JAX_PLATFORMS", "") and _gpus():
        remedy = f"install JAX for CUDA: {install_command('cuda', 'jax[cuda13]')}"
        problems.append(Problem("an NVIDIA GPU is here, and JAX does not use it", remedy))
    rows = []
    for device in found:
        row: dict[str, Any] = {"id": device.id, "kind": device.device_kind, "platform": device.platform}
        capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
        if capability is not None:
            row["compute_capability"] = capability
            if float(capability) < LEAST_CAPABILITY:
                cause = f"device {device.id} has compute capability {capability}, less than {LEAST_CAPABILITY}"
                problems.append(Problem(cause, "give implementation='xla' where a kernel does not compile"))
        rows.append(row)
    return rows


def _gpus() -> list[list[int]]:
    """Return the free and the total bytes of each NVIDIA GPU, as its driver says; nothing where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return [[int(part) * 2**20 for part in row] for row in rows if all(part.strip().isdecimal() for part in row)]


def memory(problems: list[Problem]) -> dict[str, tuple[int, int]]:
    """Return the free and the total bytes of the host and of NVIDIA GPUs, and note where little is free."""
    found: dict[str, tuple[int, int]] = {}
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        page = os.sysconf("SC_PAGE_SIZE")
        free = _available() or page * os.sysconf("SC_AVPHYS_PAGES")
        found["the host"] = free, page * os.sysconf("SC_PHYS_PAGES")
        if free < LEAST_MEMORY:
            problems.append(Problem(f"the host has {free / 1e6:.0f} MB of free memory", "end other programs"))
    for i, (free, total) in enumerate(_gpus()):
        found[f"GPU {i}"] = free, total
        if free < LEAST_SHARE * total:
            remedy = "end the processes that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
            problems.append(Problem(f"GPU {i} has {free / 1e9:.1f} GB of {total / 1e9:.1f} GB free", remedy))
    return found


def _available() -> int | None:
    """Return the bytes that programs can take on Linux, where files in memory can give way."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * sizes[0] if sizes else None


def program_folder(problems: list[Problem]) -> dict[str, Any]:
    """Return the folder of compiled programs with its size, and note where programs are not kept."""
    config: Any = jax.config
    remedy = "every start compiles anew; name a folder by --compilation-cache or JAX_COMPILATION_CACHE_DIR"
    if not config.jax_enable_compilation_cache:
        problems.append(Problem("JAX_ENABLE_COMPILATION_CACHE turns the folder of programs off", remedy))
        return {"folder": None}
    try:
        folder = Path(compilation_cache.used_folder() or compilation_cache.default_folder())
    except RuntimeError as error:  # there is no home directory
        problems.append(Problem(f"compiled programs have no folder: {error}", remedy))
        return {"folder": None}
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    row: dict[str, Any] = {"folder": str(folder), "files": len(files), "bytes": sum(files), "is_writable": True}
    beside = next(path for path in (folder, *folder.parents) if path.exists())
    row["free_bytes"] = shutil.disk_usage(beside).free
    try:
        with tempfile.TemporaryFile(dir=beside):
            pass
    except OSError as error:
        row["is_writable"] = False
        problems.append(Problem(f"compiled programs cannot be written to {folder}: {error.strerror}", remedy))
    if row["free_bytes"] < LEAST_DISK:
        cause = f"the disk of {folder} has {row['free_bytes'] / 1e6:.0f} MB free"
        problems.append(Problem(cause, "delete files there, or name a folder elsewhere by --compilation-cache"))
    return row
