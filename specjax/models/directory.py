"""The directory of a checkpoint, each of whose files is read once."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.models import tokenizer as tokenizers
from specjax.models.config_file import DTYPES, ConfigFile, read_json
from specjax.models.diagnosis import hint, is_gguf
from specjax.models.gguf.config import config_of, settings_of
from specjax.models.gguf.header import read_header
from specjax.models.gguf.tensors import GGUFScheme, open_gguf
from specjax.models.gguf.tokenizer import tokenizer_of
from specjax.models.quantized import FORMATS
from specjax.validation import suggestion
from specjax.validation.extras import needs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specjax.models.quantization import Scheme
    from specjax.models.tensors import Tensors

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # fields of several tokens
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"


def check_quantization(name: str, quantization: str | None) -> None:
    """Raise ValueError unless weights may be rounded to a format; errors call it `name`."""
    if quantization is not None and not (isinstance(quantization, str) and quantization in FORMATS):
        hint = suggestion(quantization, FORMATS)
        raise ValueError(f"{name} must be None, {', '.join(map(repr, FORMATS))}, got {quantization!r}{hint}")


def _text_part(config: ConfigFile) -> ConfigFile:
    """Return the fields of the language model in a checkpoint that takes images, too; of others, no fields."""
    is_table = isinstance(config.fields.get("text_config"), dict)
    return config.table("text_config") if is_table else ConfigFile(config.path, {})


def _named(templates: list[Any], name: str) -> str | None:
    """Return the template of a name, where a checkpoint has one for each purpose; None without it."""
    found = [each.get("template") for each in templates if isinstance(each, dict) and each.get("name") == name]
    return found[0] if found and isinstance(found[0], str) else None


class Checkpoint:
    """A checkpoint of a model or of a drafter, in the Hugging Face layout or in one GGUF file.

    Files are read when they are first asked for, and kept. A file that changes later is not read again.

    Args:
        directory: the directory with config.json, the tensors, and usually the tokenizer; or the path of a GGUF file.
        quantization: "int8", "int4" or "fp8", to which the matrices of layers are rounded when they are read; None
            leaves the weights as they are stored.
        keep_codes: whether matrices in codes stay `Quantized`. Otherwise they become the floats for which they stand
            when they are read, which takes the memory of floats. That is faster where no kernel reads codes, as on
            CPUs, because XLA makes the floats anew in every call.

    Attributes:
        directory: the same directory.
        quantization: the same format.
        keep_codes: the same choice.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: the directory is no path, or the quantization has no such format.

    Example:
        >>> from specjax import models
        >>> checkpoint = models.Checkpoint(models.EMBEDDED / "target")
        >>> checkpoint.config.get("model_type", str), checkpoint.dtype
        ('llama', 'bfloat16')
    """

    def __new__(
        cls, directory: str | Path, quantization: str | None = None, *, keep_codes: bool = True
    ) -> "Checkpoint":
        if not isinstance(directory, str | Path):
            raise ValueError(f"directory must be a path, got {directory!r}")
        if cls is Checkpoint and is_gguf(directory):
            return object.__new__(GGUFCheckpoint)
        return object.__new__(cls)

    def __init__(self, directory: str | Path, quantization: str | None = None, *, keep_codes: bool = True):
        check_quantization("quantization", quantization)
        self.directory, self.quantization, self.keep_codes = Path(directory), quantization, keep_codes
        if not self.directory.is_dir():
            got = f"{directory}, which is not a directory{hint(self.directory)}"
            raise FileNotFoundError(f"directory must hold a checkpoint, got {got}")
        self._fields: dict[str, dict[str, Any]] = {}  # the fields of each JSON file that has been read, by its name

    @classmethod
    def of(cls, directory: "str | Path | Checkpoint") -> "Checkpoint":
        """Return the checkpoint in a directory, or a checkpoint as it is."""
        return directory if isinstance(directory, Checkpoint) else cls(directory)

    @property
    def config(self) -> ConfigFile:
        """The fields of config.json; each access returns a new object, which notes the fields that are read by it.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: the file is damaged.
        """
        return self._read("config.json")

    def settings(self, name: str) -> ConfigFile:
        """Return the fields of another JSON file, as `config` does; without the file there are no fields.

        Raises:
            ValueError: the file is damaged.
        """
        is_file = name in self._fields or (self.directory / name).is_file()
        return self._read(name) if is_file else ConfigFile(self.directory / name, {})

    def _read(self, name: str) -> ConfigFile:
        if name not in self._fields:
            self._fields[name] = read_json(self.directory / name)
        return ConfigFile(self.directory / name, dict(self._fields[name]))

    @property
    def dtype(self) -> str:
        """The dtype that config.json, or its table text_config, names for the weights; float32 if there is none.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: the file is damaged, or names a dtype that `models.load` does not take.
        """
        for config in (self.config, _text_part(self.config)):
            for name in ("dtype", "torch_dtype"):
                if name in config:
                    return config.choice(name, DTYPES)
        return "float32"

    def tensors(
        self, dtype: np.dtype, sharding: jax.sharding.Sharding | None = None, *, in_parts: bool = False
    ) -> "Tensors":
        """Return the tensors of a model, none of them read yet; see `Tensors` for the arguments.

        Raises:
            FileNotFoundError: there are no tensors, or an index names a file that does not exist.
            ValueError: a file is damaged.
        """
        choices = {"quantization": self.quantization, "keep_codes": self.keep_codes}
        return self._model_tensors.anew(dtype, sharding, in_parts=in_parts, **choices)

    def drafter_tensors(self, dtype: np.dtype) -> "Tensors":
        """Return the tensors of a drafter, which may lie in files that torch.save wrote; none of them is read yet.

        Raises:
            FileNotFoundError: there are no tensors, or an index names a file that does not exist.
            ValueError: a file is damaged.
        """
        return self._drafter_tensors.anew(dtype, quantization=self.quantization, keep_codes=self.keep_codes)

    @cached_property
    def _model_tensors(self) -> "Tensors":
        with needs("models"):
            from specjax.models.tensors import Tensors
        return Tensors(self.directory, np.dtype("float32"), scheme=self.scheme)

    @cached_property
    def scheme(self) -> "Scheme | None":
        """How the files store matrices in codes; None where they store floats.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: a file is damaged, the format is unknown or a field of it is not supported, or the weights are
                to be rounded to another format.
        """
        scheme = self._stored_scheme()
        if scheme is not None and self.quantization is not None:
            raise ValueError(
                f"quantization must be None for weights that are quantised already, as in {self.directory}, got "
                f"{self.quantization!r}"
            )
        return scheme

    def _stored_scheme(self) -> "Scheme | None":
        config, beside = self.quantization_fields, self.settings("hf_quant_config.json")
        if not config.fields and not beside.fields:
            return None
        from specjax.models.quantization import scheme_of

        return scheme_of(config if config.fields else beside)

    @property
    def quantization_fields(self) -> ConfigFile:
        """The table quantization_config of config.json or of its table text_config; empty where neither has one.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: the file is damaged.
        """
        config = self.config
        has_own = bool(config.fields.get("quantization_config"))
        return (config if has_own else _text_part(config)).table("quantization_config")

    @cached_property
    def _drafter_tensors(self) -> "Tensors":
        with needs("models"):
            from specjax.models.files import drafter_files
            from specjax.models.tensors import Tensors
        return Tensors(self.directory, np.dtype("float32"), files=drafter_files(self.directory), scheme=self.scheme)

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of the tokenizer's file, which is in the directory or a tokenizer.json beside it; None without."""
        return tokenizers.find_tokenizer(self.directory)

    def tokenizer(self) -> "Tokenizer":
        """Return the tokenizer, which neither truncates nor pads.

        Raises:
            ModuleNotFoundError: the package tokenizers is not installed.
            ValueError: there is no tokenizer, its file is damaged, or reading it needs transformers, which is not
                installed.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return tokenizers.load_tokenizer(self.directory)

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of the tokens that end a sequence, without duplicates.

        They are the eos_token_id of generation_config.json or, if that file names none, of config.json or of its table
        text_config, the eos_token of tokenizer_config.json or, in early checkpoints, of special_tokens_map.json, and
        the tokens that end a turn of gpt-oss.

        Args:
            vocab_size: V of the model.

        Raises:
            ValueError: a file is damaged, or it names something that is not a token.
        """
        ids = tokenizers.eos_ids(self.settings("generation_config.json"), vocab_size)
        config = self.settings("config.json")
        ids = ids or tokenizers.eos_ids(config, vocab_size) or tokenizers.eos_ids(_text_part(config), vocab_size)
        config = self._special_settings("eos_token")
        token = tokenizers.token_text(config, "eos_token")
        if token is not None:
            token_id = self.tokenizer().token_to_id(token)
            if token_id is None or token_id >= vocab_size:
                expected = f"a token of the tokenizer with an id below vocab_size = {vocab_size}"
                raise ValueError(f"{config.where('eos_token')} must be {expected}, got {token!r}")
            ids.append(token_id)
        if self.tokenizer_path is not None:
            ids += [one for one in tokenizers.harmony_ends(self.tokenizer()) if one < vocab_size]
        return tuple(dict.fromkeys(ids))

    @property
    def special_tokens(self) -> dict[str, str | list[str]]:
        """The texts of the special tokens that tokenizer_config.json names, by the names that chat templates know.

        They are the tokens of `SPECIAL_TOKENS` and of other fields whose names end with "_token", the tokens that an
        object extra_special_tokens names, and the list additional_special_tokens. Checkpoints of early tokenizers name
        them in special_tokens_map.json.

        Raises:
            ValueError: a file is damaged.
        """
        files = self.settings("tokenizer_config.json").fields, self.settings("special_tokens_map.json").fields
        named = [name for fields in files for name in fields if name.endswith("_token")]
        fields = {name: self._special_settings(name) for name in (*SPECIAL_TOKENS, *named)}
        if isinstance((table := self._special_settings(EXTRA)).fields.get(EXTRA), dict):
            fields |= dict.fromkeys(table.fields[EXTRA], table.table(EXTRA))
        found: dict[str, str | list[str]] = {}
        for name, config in fields.items():
            is_token = name in SPECIAL_TOKENS or isinstance(config.fields.get(name), str | dict)
            if is_token and (text := tokenizers.token_text(config, name)) is not None:
                found[name] = text
        config = self._special_settings(ADDITIONAL)
        tokens = {f"{ADDITIONAL}[{i}]": token for i, token in enumerate(config.get(ADDITIONAL, list, []))}
        if tokens:
            texts = [tokenizers.token_text(ConfigFile(config.path, tokens), name) for name in tokens]
            found[ADDITIONAL] = [text for text in texts if text is not None]
        return found

    def _special_settings(self, name: str) -> ConfigFile:
        """Return the fields of the file that names a special token, the one that transformers reads."""
        config, early = self.settings("tokenizer_config.json"), self.settings("special_tokens_map.json")
        return early if name in early.fields and "added_tokens_decoder" not in config.fields else config

    @cached_property
    def template_file(self) -> str | None:
        """The content of chat_template.jinja; None without the file."""
        path = self.directory / "chat_template.jinja"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    @property
    def chat_template(self) -> str:
        """The template of conversations: chat_template.jinja, or the field chat_template of tokenizer_config.json.

        Early checkpoints that take images may have it in chat_template.json alone.

        Raises:
            ValueError: there is none, or a JSON file is damaged.
        """
        if self.template_file is not None:
            return self.template_file
        config = self.settings("tokenizer_config.json")
        template = config.fields.get("chat_template")
        template = _named(template, "default") if isinstance(template, list) else template
        if template is None:
            template = self.settings("chat_template.json").fields.get("chat_template")
        if not isinstance(template, str):
            expected = f"chat_template.jinja, or chat_template in {config.path.name}, to chat"
            raise ValueError(f"{self.directory} must have {expected}")
        return template

    @property
    def tool_template(self) -> str | None:
        """The template of conversations with tools, where it is another one than `chat_template`; None otherwise.

        It is additional_chat_templates/tool_use.jinja, or of this name in the field chat_template of
        tokenizer_config.json.

        Raises:
            ValueError: tokenizer_config.json is damaged.
        """
        path = self.directory / TOOL_TEMPLATE
        if path.is_file():
            return path.read_text(encoding="utf-8")
        if self.template_file is not None:
            return None
        template = self.settings("tokenizer_config.json").fields.get("chat_template")
        return _named(template, path.stem) if isinstance(template, list) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_template` is there."""
        try:
            return isinstance(self.chat_template, str)
        except ValueError:
            return False


class GGUFCheckpoint(Checkpoint):
    """A checkpoint of a model in a GGUF file, whose header has the fields of the files of a directory.

    Args:
        path: the file.
        quantization: as `Checkpoint` takes it, for a file whose matrices are floats.
        keep_codes: as `Checkpoint` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or a part of a model, its architecture or a type of its tensors is unknown, or a
            field is missing, wrong or not supported.
    """

    def __init__(self, path: str | Path, quantization: str | None = None, *, keep_codes: bool = True):
        check_quantization("quantization", quantization)
        self.directory, self.quantization, self.keep_codes = Path(path), quantization, keep_codes
        header = read_header(self.directory)
        self._fields: dict[str, dict[str, Any]] = {"config.json": config_of(header), **settings_of(header)}

    def _read(self, name: str) -> ConfigFile:
        return ConfigFile(self.directory, dict(self._fields[name]))

    def settings(self, name: str) -> ConfigFile:
        """Return the fields that another JSON file of the checkpoint would have; of most files there are none."""
        return ConfigFile(self.directory, dict(self._fields.get(name, {})))

    def _stored_scheme(self) -> GGUFScheme | None:
        file = open_gguf(self.directory)
        has_codes = any(place.is_kept for place in file.entries.values())
        return GGUFScheme(self.directory) if has_codes else None

    @cached_property
    def _model_tensors(self) -> "Tensors":
        with needs("models"):
            from specjax.models.tensors import Tensors
        return Tensors(self.directory, np.dtype("float32"), files=[self.directory], scheme=self.scheme)

    @cached_property
    def _drafter_tensors(self) -> "Tensors":
        return self._model_tensors

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of the file."""
        return self.directory

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return tokenizer_of(read_header(self.directory))

    @cached_property
    def template_file(self) -> str | None:
        """None: the template is in the header."""
        return None
