"""Checkpoints by their name on the Hugging Face Hub."""

import re
from pathlib import Path

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")  # org/name, with a revision behind @
FILES = (  # that specjax reads: no weights of other formats, and no second copy in another folder
    "config.json",
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
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


def find_checkpoint(argument: str, name: str | Path) -> Path:
    """The directory of a checkpoint, fetched through huggingface_hub, with its cache, where it is named on the Hub.

    Args:
        argument: what the name was given as, for messages.
        name: a directory, or "org/name" or "org/name@revision" where there is no such directory.

    Raises:
        ValueError: it is neither, huggingface_hub is not installed, or it cannot fetch the checkpoint.
    """
    if Path(name).is_dir():
        return Path(name)
    message = (
        f"{argument} must be a directory with a Hugging Face checkpoint, or the name of one on the Hugging Face Hub "
        f"(org/name), got {str(name)!r}"
    )
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(message)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{message}, which is no directory; to fetch it, install huggingface_hub: pip install "specjax[hf]"'
        ) from error
    repository, revision = match.groups()
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # of the network, the Hub or the disk, of many types
        reason = " ".join(str(error).split())
        raise ValueError(f"{message}, which is no directory and cannot be fetched: {reason}") from error
