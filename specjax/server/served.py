"""Properties of the served model for parsing bodies and writing answers."""

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.models.directory import Checkpoint
from specjax.models.tokenizer import harmony_ends
from specjax.sampling import guided
from specjax.version import __version__

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from specjax.engine.llm import LLM

MAX_NAME_LENGTH = 512  # characters of a name of a model
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class Served:
    """A model that answers requests.

    Args:
        name: the name that clients give as `model`, and the first of its names.
        tokenizer: its tokenizer.
        vocab_size: V.
        max_length: the most tokens of a prompt and its answer.
        eos_token_ids: its end-of-sequence tokens.
        directory: directory of the checkpoint, for its chat template; None is a model that does not chat.
        defaults: values of sampling parameters that a request leaves out, as `generation_defaults` reads them.
        fingerprint: a text that changes where the same request may get another answer.
        aliases: further names that clients may give.
        takes_any_name: whether clients may give any other name, too.
    """

    name: str
    tokenizer: "Tokenizer"
    vocab_size: int
    max_length: int
    eos_token_ids: Sequence[int] = ()
    directory: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    aliases: Sequence[str] = ()
    takes_any_name: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the model, the first of them first."""
        return list(dict.fromkeys([self.name, *self.aliases]))

    def is_called(self, name: str) -> bool:
        """Return whether clients may call the model so."""
        return self.takes_any_name or name in self.names

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint in `directory`, whose absolute path stands in errors; a short one, ".", is not unique."""
        return None if self.directory is None else Checkpoint(self.directory.absolute())

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The bytes of every token, empty for special tokens."""
        return guided.vocabulary(self.tokenizer)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the tokens that decoding leaves out."""
        return frozenset(token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def is_harmony(self) -> bool:
        """Whether its answers to chats are in the form of gpt-oss, by its tokens."""
        return bool(harmony_ends(self.tokenizer))

    @cached_property
    def numbers_calls(self) -> bool:
        """Whether its template knows calls of tools by `functions.NAME:NUMBER` alone, as Kimi K2's does."""
        return self.tokenizer.token_to_id("<|tool_call_argument_begin|>") is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> "Encoding":
        """Return the encoding of a text. Other threads run meanwhile, as they do not while `Tokenizer.encode` does."""
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; of a special token, the bytes of its name."""
        known = self.vocabulary[token] if token < len(self.vocabulary) else b""
        return known or (self.tokenizer.id_to_token(token) or "").encode()

    def token_text(self, token: int) -> str:
        r"""Return the text of a token; where it is a part of a character, "bytes:" and its bytes as \x.. each."""
        content = self.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def offsets(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Return where in a text that begins at `start` the text of each token begins, in characters."""
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in tokens:
            found.append(start)
            start += len(decoder.decode(self.vocabulary[token] if token < len(self.vocabulary) else b""))
        return found


def name_of(model: str | Path | None) -> str:
    """Return the name of a model for clients by default: the name of its directory, specjax for the embedded family."""
    return "specjax" if model is None else Path(model).absolute().name  # "." alone has no name


def served(llm: "LLM", name: str, aliases: Sequence[str] = (), *, takes_any_name: bool = False) -> Served:
    """Return the `Served` of an LLM under some names; `Served` describes the arguments.

    Raises:
        ValueError: generation_config.json of the checkpoint is damaged, or a name is empty or too long.
    """
    for each in (name, *aliases):
        if not 0 < len(each) <= MAX_NAME_LENGTH:
            raise ValueError(f"the name of a model must have 1 to {MAX_NAME_LENGTH} characters, got {each[:100]!r}")
    about = [__version__, jax.__version__, jax.default_backend(), name, str(llm.max_length)]
    directory = None if llm.checkpoint is None else llm.checkpoint.directory
    about += [
        str(llm.proposer.num_draft_tokens),
        getattr(llm.verifier, "__name__", ""),
        directory.name if directory else "",
    ]
    about += [str(leaf.dtype) for leaf in jax.tree.leaves(llm.model.params)[:1]]
    return Served(
        name=name,
        tokenizer=llm.tokenizer,
        vocab_size=llm.model.vocab_size,
        max_length=llm.max_length,
        eos_token_ids=llm.eos_token_ids,
        directory=directory,
        defaults={} if llm.checkpoint is None else generation_defaults(llm.checkpoint),
        fingerprint="fp_" + hashlib.sha256("\0".join(about).encode()).hexdigest()[:12],
        aliases=tuple(aliases),
        takes_any_name=takes_any_name,
    )


def tokenizer_info(served: Served) -> dict[str, Any]:
    """Return the settings of a tokenizer, as tokenizer_config.json of a checkpoint has them.

    Special tokens are texts. `eos_token` is there if any token ends a sequence, `chat_template` if there is a template.

    Raises:
        ValueError: the file is damaged.
    """
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if served.eos_token_ids:
        found["eos_token"] = served.tokenizer.id_to_token(served.eos_token_ids[0])
    if (checkpoint := served.checkpoint) is not None:
        found |= checkpoint.settings("tokenizer_config.json").fields | checkpoint.special_tokens
        if checkpoint.template_file is not None:
            found["chat_template"] = checkpoint.template_file
    return found | {"model_max_length": served.max_length}


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json of a checkpoint names.

    They are temperature, top_p, top_k (where 0 is -1, which keeps all), min_p, repetition_penalty, and max_new_tokens.

    Raises:
        ValueError: the file is damaged, or a value is no number.
    """
    config = checkpoint.settings("generation_config.json")
    found = {name: config.fields[name] for name in DEFAULTS if config.fields.get(name) is not None}
    for name, value in found.items():
        kinds = (int,) if name in ("top_k", "max_new_tokens") else (int, float)
        if type(value) not in kinds:
            raise ValueError(f"{config.where(name)} must be a number, got {value!r}")
    if found.get("top_k") == 0:
        found["top_k"] = -1
    return found
