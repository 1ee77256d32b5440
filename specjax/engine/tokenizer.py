"""The tokenizer of a checkpoint, and its end-of-sequence tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.models.config_file import ConfigFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_FORMATS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # what transformers can convert


def find_tokenizer(directory: Path) -> Path | None:
    """The file that tells the tokenizer of a checkpoint: in its directory, or a tokenizer.json beside it."""
    paths = [directory / name for name in ("tokenizer.json", *OTHER_FORMATS)] + [directory.parent / "tokenizer.json"]
    return next((path for path in paths if path.is_file()), None)


def load_tokenizer(directory: Path) -> "Tokenizer":
    """Load the tokenizer of a checkpoint, through transformers where there is no tokenizer.json.

    Args:
        directory: of the checkpoint.

    Returns:
        A `tokenizers.Tokenizer` without truncation and padding.

    Raises:
        ValueError: there is none, it is damaged, or it takes transformers, which is not installed.
    """
    path = find_tokenizer(directory)
    if path is None:
        raise ValueError(f"model must have a tokenizer.json in its directory or beside it, got {str(directory)!r}")
    tokenizer = _from_json(path) if path.name == "tokenizer.json" else _from_transformers(path)
    tokenizer.no_truncation()  # a checkpoint may carry the settings of its training
    tokenizer.no_padding()
    return tokenizer


def _from_json(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} must be a tokenizer of the tokenizers library: {error}") from error


def _from_transformers(path: Path) -> "Tokenizer":
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{path.parent} has no tokenizer.json; to read {path.name}, install transformers: pip install "specjax[hf]"'
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer
    except Exception as error:  # of any kind, as the formats are
        raise ValueError(f"{path} must be a tokenizer that transformers can convert: {error}") from error


def eos_token_ids(directory: Path, tokenizer: "Tokenizer") -> tuple[int, ...]:
    """The tokens that end a sequence.

    Args:
        directory: of a checkpoint; those of generation_config.json or, if it has none, config.json count, and the
            eos_token of tokenizer_config.json.
        tokenizer: of the checkpoint.

    Returns:
        Their ids, each once.

    Raises:
        ValueError: a file is damaged or what it names is no token.
    """
    ids = _eos_of(directory / "generation_config.json") or _eos_of(directory / "config.json")
    path = directory / "tokenizer_config.json"
    if path.is_file():
        config = ConfigFile(path)
        token = token_text(config, "eos_token")
        if token is not None:
            token_id = tokenizer.token_to_id(token)
            if token_id is None:
                raise ValueError(f"{config.where('eos_token')} must be a token of the tokenizer, got {token!r}")
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def token_text(config: ConfigFile, name: str) -> str | None:
    """A special token of tokenizer_config.json, which is a string or an object with it as content."""
    value: Any = config.fields.get(name)
    if isinstance(value, dict):
        return config.table(name).get("content", str)
    return config.get(name, str, None)


def _eos_of(path: Path) -> list[int]:
    if not path.is_file():
        return []
    config = ConfigFile(path)
    value = config.fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{config.where('eos_token_id')} must be a token id or a list of them, got {value!r}")
    return ids
