"""Render conversations as prompts with the chat template of a checkpoint."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specjax.engine.tokenizer import token_text
from specjax.extras import needs
from specjax.models.config_file import ConfigFile

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def render(
    directory: Path,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Write messages as a prompt that ends where the assistant's answer begins.

    Args:
        directory: directory of a checkpoint. It holds chat_template.jinja, or a tokenizer_config.json with the field
            chat_template.
        messages: at least one mapping with "role" ("system", "user" or "assistant") and "content".
        tools: descriptions of functions that the model may call, if the template knows of tools.
        variables: further values that the template may use.

    Returns:
        The prompt. The template has already written the special tokens into it.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
        ValueError: messages is empty or holds something else than mappings with "role", the checkpoint has no chat
            template, or the template refuses the messages.
    """
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError(f'messages must be mappings with "role" and "content", at least one, got {messages!r}')
    with needs("chat"):
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    # A template is code that comes with the weights, so it runs in a sandbox. Published templates are written for these
    # settings, filters and globals.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    template, tokens = _read_template(directory)
    try:
        values = variables | tokens | {"messages": messages, "tools": tools, "documents": None}
        return environment.from_string(template).render(values, add_generation_prompt=True)
    except Exception as error:  # the template's code may raise anything
        raise ValueError(f"the chat template of {directory} refuses the messages: {error}") from error


def has_template(directory: Path) -> bool:
    """Return whether a checkpoint has a chat template."""
    try:
        _read_template(directory)
    except ValueError:
        return False
    return True


def _read_template(directory: Path) -> tuple[str, dict[str, str]]:
    """Return the template, and the text of each special token that the template may use."""
    path = directory / "tokenizer_config.json"
    config = ConfigFile(path, None if path.is_file() else {})
    tokens = {name: text for name in SPECIAL_TOKENS if (text := token_text(config, name)) is not None}
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8"), tokens
    template = config.fields.get("chat_template")
    if isinstance(template, list):  # the checkpoint has one template for each purpose
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise ValueError(f"{directory} must have chat_template.jinja, or chat_template in {path.name}, to chat")
    return template, tokens
