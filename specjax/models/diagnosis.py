"""Say why a path holds no checkpoint that specjax reads, and how to mend it."""

import json
from contextlib import suppress
from pathlib import Path

from specjax.validation import suggestion


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file, by its ending."""
    return Path(path).suffix == ".gguf" and not Path(path).is_dir()


def hint(path: Path) -> str:
    """Return the end of a message about a path that is no directory: why, or a directory with a similar name."""
    if path.is_file():
        return "; it is a file: give the directory that holds it"
    with suppress(RuntimeError):  # there is no home directory
        if path.expanduser().is_dir():
            return f"; did you mean {str(path.expanduser())!r}?"
    names = []
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir() if each.is_dir()]
    return suggestion(path.name, names)


def lacks(directory: Path, *names: str) -> FileNotFoundError:
    """Return the error for a directory that has none of some files of a checkpoint.

    Args:
        directory: a directory.
        names: the files of which a checkpoint must have one.
    """
    files = sorted(path.name for path in directory.iterdir())
    expected = " or ".join(names)
    inside = sorted(path.parent for folder in ("*", "snapshots/*") for path in directory.glob(f"{folder}/{names[0]}"))
    unread = {".bin", ".pt", ".pth"} - {Path(name).suffix for name in names}
    torch = [name for name in files if Path(name).suffix in unread]
    if not files:
        cause = f"is empty; it must hold {expected}"
    elif "adapter_config.json" in files:
        cause = f"holds an adapter (PEFT) and no whole model; merge it into {_base(directory)} and save that model"
    elif any(name.endswith(".gguf") for name in files):
        name = next(name for name in files if name.endswith(".gguf"))
        cause = f"holds a GGUF file and no {expected}; give the path of the file, {str(directory / name)!r}"
    elif inside:
        cause = f"has no {expected}, but a folder in it has; did you mean {str(inside[-1])!r}?"
    elif torch and names[0] != "config.json":
        cause = f"holds weights that torch.save wrote ({torch[0]}) and no {expected}; save the model as safetensors"
    else:
        cause = f"has no {expected}; give the directory of a whole checkpoint"
    return FileNotFoundError(f"{directory} {cause}")


def _base(directory: Path) -> str:
    """Return the name that an adapter gives to its model."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]
    return "its base model"


def check_not_pointer(path: Path) -> None:
    """Raise ValueError if a file is Git's pointer to a large file that was not fetched."""
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/spec"):
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself; run: git lfs pull")
