"""JAX's persistent compilation cache, in which later processes find the programs that earlier ones compiled."""

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

LEAST_SECONDS, JAX_LEAST_SECONDS = 0.05, 1.0  # that a program takes to compile to be kept; JAX's own number

logger = logging.getLogger(__name__)


def enable(folder: str | Path | Literal[False] | None) -> None:
    """Keep the programs that this process compiles in a folder, unless JAX is already configured otherwise.

    The setting is JAX's own: it applies to the whole process. Programs that compile within LEAST_SECONDS are left out,
    unless jax_persistent_cache_min_compile_time_secs says another time than JAX does by itself. If the folder cannot be
    written, a warning is logged and the folder is not used.

    Args:
        folder: where to keep the programs; the folder is created if it does not exist. None is `default_folder()`, and
            False changes nothing.

    Raises:
        ValueError: the folder has a wrong type, or JAX already uses another one.
    """
    if folder is False:
        return
    if not (folder is None or isinstance(folder, str | Path)):
        raise ValueError(f"compilation_cache must be a path, None or False, got {folder!r}")
    config: Any = jax.config  # which gets the attributes of its options at run time
    used = config.jax_compilation_cache_dir
    if used is not None and folder is not None and Path(folder).expanduser().absolute() != Path(used).absolute():
        raise ValueError(
            f"compilation_cache must be None or {used!r}, which JAX uses already (jax_compilation_cache_dir), "
            f"got {str(folder)!r}"
        )
    if used is not None or not config.jax_enable_compilation_cache:
        return
    try:
        path = default_folder() if folder is None else Path(folder).expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever can write here can run code in this process
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError) as error:  # `Path.home` raises RuntimeError without a home directory
        logger.warning("every start compiles anew, because the compilation cache cannot be written: %s", error)
        return
    config.update("jax_compilation_cache_dir", str(path))
    if config.jax_persistent_cache_min_compile_time_secs == JAX_LEAST_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    compilation_cache.reset_cache()  # JAX may have settled on no cache at its first compilation


def used_folder() -> str | None:
    """Return the folder that JAX uses; None where it uses none."""
    config: Any = jax.config
    return config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None


def disable() -> None:
    """Have this process compile everything itself."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


def default_folder() -> Path:
    """Return the folder for compiled programs in the user's cache directory."""
    if sys.platform == "win32":
        root, fallback = os.environ.get("LOCALAPPDATA", ""), "AppData/Local"
    elif sys.platform == "darwin":
        root, fallback = "", "Library/Caches"
    else:
        root, fallback = os.environ.get("XDG_CACHE_HOME", ""), ".cache"
    directory = Path(root) if os.path.isabs(root) else Path.home() / fallback
    return directory / "specjax" / "xla"
