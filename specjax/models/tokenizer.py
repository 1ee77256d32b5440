"""Load the tokenizer of a checkpoint, and read the tokens that its JSON files name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.models.config_file import ConfigFile
from specjax.validation.extras import install_command, needs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_FORMATS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # transformers converts these


def find_tokenizer(directory: Path) -> Path | None:
    """Return the path of a checkpoint's tokenizer file, which is in its directory or a tokenizer.json beside it."""
    paths = [directory / name for name in ("tokenizer.json", *OTHER_FORMATS)] + [directory.parent / "tokenizer.json"]
    return next((path for path in paths if path.is_file()), None)


def load_tokenizer(directory: Path) -> "Tokenizer":
    """Load the tokenizer of a checkpoint; without a tokenizer.json, let transformers convert an older format.

    Args:
        directory: directory of the checkpoint.

    Returns:
        A `tokenizers.Tokenizer` that neither truncates nor pads.

    Raises:
        ValueError: the checkpoint has no tokenizer, its file is damaged, or reading it needs transformers, which is not
            installed.
    """
    path = find_tokenizer(directory)
    if path is None:
        raise ValueError(f"model must have a tokenizer.json in its directory or beside it, got {str(directory)!r}")
    tokenizer = _from_json(path) if path.name == "tokenizer.json" else _from_transformers(path)
    tokenizer.no_truncation()  # the file may carry the settings that the model was trained with
    tokenizer.no_padding()
    return tokenizer


def _from_json(path: Path) -> "Tokenizer":
    with needs("models"):
        from tokenizers import Tokenizer
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{path} must be a tokenizer of the tokenizers library: {error}") from error


def _from_transformers(path: Path) -> "Tokenizer":
    try:
        # The extra `hf` installs it.
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        command = install_command("hf", "transformers")
        raise ValueError(
            f"{path.parent} has no tokenizer.json; to read {path.name}, install transformers: {command}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer
    except Exception as error:  # each format fails with another type of exception
        raise ValueError(f"{path} must be a tokenizer that transformers can convert: {error}") from error


def harmony_ends(tokenizer: "Tokenizer") -> list[int]:
    """Return the ids of the two tokens that end a turn of gpt-oss; empty for a tokenizer without its form, harmony."""
    names = "return", "call", "start", "channel", "message"
    ids = [found for name in names if (found := tokenizer.token_to_id(f"<|{name}|>")) is not None]
    return ids[:2] if len(ids) == len(names) else []


def token_text(config: ConfigFile, name: str) -> str | None:
    """Return the text of a special token in tokenizer_config.json, or None.

    The field is the text itself, or an object that holds the text in its field `content`.
    """
    value: Any = config.fields.get(name)
    if isinstance(value, dict):
        return config.table(name).get("content", str)
    return config.get(name, str, None)


def eos_ids(config: ConfigFile, vocab_size: int) -> list[int]:
    """Return the eos_token_id of a JSON file as a list, empty if the field is missing.

    Raises:
        ValueError: the field has something else than ids of tokens in [0, vocab_size).
    """
    value = config.fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        expected = f"a token id in [0, vocab_size = {vocab_size}) or a list of them"
        raise ValueError(f"{config.where('eos_token_id')} must be {expected}, got {value!r}")
    return list(ids)
