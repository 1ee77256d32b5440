"""The fields of `SamplingParams` as arguments of commands: its types make the arguments, its docstring their help."""

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args

from specjax.sampling import SamplingParams, guided

LEFT_OUT = "logits_processors", "guided_decoding"  # functions, and a value that the arguments of _add_guided make
ONLY_JSON = "logprobs", "prompt_logprobs"  # fields whose values a text cannot show


def add_sampling_arguments(command: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an argument for each field of `SamplingParams`, and for guided decoding.

    Args:
        command: the command.
        defaults: values of fields for which the command has another default than `SamplingParams`.
    """
    group = command.add_argument_group("sampling")
    about = _descriptions()
    for field in fields(SamplingParams):
        if field.name not in LEFT_OUT:
            _add_field(group, field, about.get(field.name, ""), defaults.get(field.name, field.default))
    guide = group.add_mutually_exclusive_group()
    guide.add_argument("--regex", metavar="PATTERN", help="a regular expression that the whole text follows")
    guide.add_argument("--json-schema", type=Path, metavar="FILE", help="file with a JSON schema that the text follows")
    guide.add_argument("--choice", action="append", metavar="TEXT", help="a possible text; may be repeated")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the arguments of `add_sampling_arguments` say.

    Raises:
        ValueError: a value is outside its range.
        OSError: the file of --json-schema cannot be read.
    """
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParams) if field.name not in LEFT_OUT}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(guided_decoding=_guide(args), **given)


def _descriptions() -> dict[str, str]:
    """Return the first clause about each field in the docstring of `SamplingParams`."""
    text = inspect.getdoc(SamplingParams) or ""
    about = re.findall(r"^    (\w+): (.*?)(?=^    \w|^\S|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return {name: re.split(r"\. |\.$|; None", " ".join(words.split()))[0] for name, words in about}


def _add_field(group: Any, field: Field, about: str, default: Any) -> None:
    """Add the argument of one field."""
    shown = "" if default is None or isinstance(default, bool) else f"; default: {default}"
    options: dict[str, Any] = {"default": default, "help": f"{about}{shown}".replace("%", "%%")}
    flag = f"--{field.name.replace('_', '-')}"
    kinds = set(get_args(field.type) or (field.type,)) - {type(None)}
    if bool in kinds:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        return
    if kinds <= {int, float}:
        (number,) = kinds
        group.add_argument(flag, type=number, metavar="N" if number is int else "X", **options)
        return
    options["help"] += "; may be repeated"
    metavar, parse = _item(kinds)
    group.add_argument(flag, action="append", type=parse, metavar=metavar, **options)


def _item(kinds: set[Any]) -> tuple[str, Callable[[str], Any]]:
    """Return the name and the type of one value of a field that holds several."""
    if Sequence[int] in kinds:
        return "ID", int
    return ("ID=X", _bias) if Mapping[int, float] in kinds else ("TEXT", str)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a token id and a number, as 42=-1.5, got {text!r}") from None


def _guide(args: argparse.Namespace) -> "guided.Regex | guided.JsonSchema | guided.Choices | None":
    """Return the source of the grammar that the arguments name."""
    if args.regex is not None:
        return guided.Regex(args.regex)
    if args.choice is not None:
        return guided.Choices(tuple(args.choice))
    if args.json_schema is None:
        return None
    return guided.JsonSchema(args.json_schema.read_text(encoding="utf-8"))
