"""Read the bodies of OpenAI's completion requests. Nothing here knows of HTTP; `answers` makes what goes back.

Every limit on sizes and counts is a constant of this module, of `messages` or of `tools`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specjax.sampling import SamplingParams, guided
from specjax.server.fields import BadRequest, Fields, check_tree, shown
from specjax.server.messages import MAX_TEXT_LENGTH, encode_chat, read_messages, read_template_arguments
from specjax.server.served import Served
from specjax.server.tools import Tools, read_tools

__all__ = ["BadRequest", "Call", "Constraint", "bad_parameter", "parse_chat", "parse_completion"]

MAX_PROMPTS = 128  # prompts of a body
MAX_SAMPLES = 128  # prompts times the larger of n and best_of
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # stop strings, and characters of one
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 64, 64  # words, and characters of one
MAX_TOP_LOGPROBS = 20
MAX_REGEX_LENGTH = 4096  # characters
MAX_SCHEMA_LENGTH = 2**16  # characters of a JSON schema as text
MAX_CHOICES, MAX_CHOICES_LENGTH = 256, 2**16  # choices, and characters of all together
MAX_USER_LENGTH = 512  # characters of user, and of other names that only label a request
MAX_PRIORITY = 2**31 - 1  # in both directions

_LABELS = ("user", "safety_identifier", "prompt_cache_key")
_UNSUPPORTED: dict[str, tuple] = {  # the values that ask for nothing; null always does
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
}
_UNSUPPORTED_COMPLETION: dict[str, tuple] = {"suffix": ("",)}
_UNSUPPORTED_CHAT: dict[str, tuple] = {
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "chat_template": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class Constraint(NamedTuple):
    """What the text of an answer must follow."""

    source: guided.Source  # what an engine compiles to a grammar
    param: str  # the field of the body that asks for it


@dataclass(frozen=True)
class Call:
    """What the body of a request asks for.

    Attributes:
        is_chat: whether it is of a chat.
        prompts: token ids of each prompt; a chat has one.
        prompt_texts: text of each prompt, empty where the answer does not echo it.
        params: sampling parameters, with what the grammar is compiled from.
        constraint: what the answers must follow, None for free text.
        priority: requests with a smaller number come first.
        stream: whether the answer is a stream.
        include_usage: whether the stream ends with the usage.
        echo: whether the text of a completion begins with its prompt.
        top_logprobs: how many of the most likely tokens the answer lists for each token; None has no log-probabilities.
        omits_output: whether nothing but the echo was asked for (max_tokens is 0); one token is generated all the same.
        tools: the tools that the model may call.
        user: what the client says of its user.
    """

    is_chat: bool
    prompts: tuple[list[int], ...]
    prompt_texts: tuple[str, ...]
    params: SamplingParams
    constraint: Constraint | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    top_logprobs: int | None = None
    omits_output: bool = False
    tools: Tools | None = None
    user: str | None = None


def parse_completion(body: Any, served: Served) -> Call:
    """Read the body of a request for completions.

    Args:
        body: what JSON makes of it.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range.
    """
    fields = _fields(body, served, _UNSUPPORTED_COMPLETION)
    echo, top = fields.boolean("echo"), fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    prompts, texts = _read_prompts(fields, served, echo)
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, served.max_length)
    answer = _read_answer(fields)
    if answer["stream"] and echo and top is not None:
        raise BadRequest("logprobs must be null in a stream with echo", "logprobs", "unsupported_parameter")
    constraint = _read_constraint(fields, None)
    params = _read_params(
        fields,
        served,
        prompts,
        default_max_tokens=16,
        max_tokens=max_tokens,
        best_of=fields.integer("best_of", 1, MAX_SAMPLES),
        logprobs=top,
        prompt_logprobs=top if echo else None,
        guided_decoding=constraint and constraint.source,
    )
    if answer["stream"] and params.num_samples > params.n:
        raise fields.refuse("best_of", f"n = {params.n} in a stream")
    fields.finish()
    more = {"echo": echo, "top_logprobs": top, "omits_output": max_tokens == 0}
    return Call(False, tuple(prompts), tuple(texts), params, constraint, **answer, **more)


def parse_chat(body: Any, served: Served) -> Call:
    """Read the body of a request for the answer to a conversation.

    Args:
        body: what JSON makes of it.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range; or the chat template refuses
            the messages.
    """
    fields = _fields(body, served, _UNSUPPORTED_CHAT)
    messages, arguments = read_messages(fields), read_template_arguments(fields)
    tools, schema = read_tools(fields)
    has_logprobs, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not has_logprobs:
        raise fields.refuse("top_logprobs", "null or 0 unless logprobs is true")
    logprobs = (top or 0) if has_logprobs else None
    names = "max_completion_tokens", "max_tokens"
    limits = [limit for name in names if (limit := fields.integer(name, 1, served.max_length)) is not None]
    if len(set(limits)) > 1:
        raise fields.refuse(names[1], f"{names[0]} = {limits[0]} or null")
    answer, constraint = _read_answer(fields), _read_constraint(fields, schema)
    prompt = encode_chat(served, messages, tools and tools.described, arguments)
    _check_length([prompt], served)
    params = _read_params(
        fields,
        served,
        [prompt],
        default_max_tokens=served.max_length,
        max_tokens=limits[0] if limits else None,
        logprobs=logprobs,
        guided_decoding=constraint and constraint.source,
    )
    fields.finish()
    return Call(True, (prompt,), ("",), params, constraint, **answer, top_logprobs=logprobs, tools=tools)


def bad_parameter(error: ValueError, constraint: Constraint | None = None) -> BadRequest:
    """Return the answer to a request that the engine refuses; its messages begin with the name of a parameter.

    Args:
        error: what the engine raised.
        constraint: that of the request, to say which of its fields made the grammar.
    """
    if isinstance(error, BadRequest):
        return error
    message, code = str(error), "invalid_value"
    if constraint is not None and message.startswith("guided_decoding"):
        message, code = message.replace("guided_decoding", constraint.param, 1), "invalid_grammar"
    name = message.partition(" ")[0]
    return BadRequest(message, name if name.isidentifier() else None, code)


def check_model(name: Any, served: Served) -> None:
    """Raise BadRequest where a name is not that of the model."""
    if name != served.name:
        message = f"model must be {served.name!r}, got {shown(name)}"
        raise BadRequest(message, "model", "model_not_found", status=404)


def _fields(body: Any, served: Served, unsupported: dict[str, tuple]) -> Fields:
    """Return a reader of a body after the checks that both kinds share."""
    check_tree(body)
    fields = Fields(body)
    check_model(fields.require("model", "the name of a model"), served)
    for field, values in (_UNSUPPORTED | unsupported).items():
        fields.neutral(field, *values)
    return fields


def _read_prompts(fields: Fields, served: Served, echo: bool) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of the prompts, and their texts if the answer needs them."""
    expected = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"
    value = fields.require("prompt", expected)
    is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    given = [value] if is_one else value
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_PROMPTS:
        raise fields.refuse("prompt", expected)
    prompts, texts = [], []
    for prompt in given:
        if isinstance(prompt, str) and len(prompt) <= MAX_TEXT_LENGTH:
            ids, text = served.encode(prompt).ids, prompt
        elif isinstance(prompt, list) and all(type(each) is int and 0 <= each < served.vocab_size for each in prompt):
            ids, text = prompt, served.tokenizer.decode(prompt, skip_special_tokens=False) if echo else ""
        else:
            limits = f"with ids in [0, {served.vocab_size}) and strings of at most {MAX_TEXT_LENGTH} characters"
            raise fields.refuse("prompt", f"{expected}, {limits}")
        if not ids:
            raise fields.refuse("prompt", "one or more tokens")
        prompts.append(ids)
        texts.append(text if echo else "")
    _check_length(prompts, served)
    return prompts, texts


def _check_length(prompts: Sequence[Sequence[int]], served: Served, max_tokens: int = 1) -> None:
    """Raise BadRequest unless the longest prompt leaves room for so many tokens."""
    longest = max(map(len, prompts))
    if longest + max_tokens > served.max_length:
        raise BadRequest(
            f"prompt and answer must have at most {served.max_length} tokens together, got a prompt of {longest} "
            f"and an answer of {max_tokens}",
            "max_tokens" if longest < served.max_length else None,
            "context_length_exceeded",
        )


def _read_answer(fields: Fields) -> dict[str, Any]:
    """Return what concerns the answer and not the sampling."""
    stream, options = fields.boolean("stream"), fields.fields("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise fields.refuse("stream_options", "null unless stream is true")
        include_usage = options.boolean("include_usage")
        options.neutral("continuous_usage_stats", False)
        options.neutral("include_obfuscation", False)
        options.finish()
    labels = [fields.text(name, MAX_USER_LENGTH) for name in _LABELS]
    priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
    return {"stream": stream, "include_usage": include_usage, "priority": priority, "user": labels[0]}


def _read_params(
    fields: Fields,
    served: Served,
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    max_tokens: int | None,
    **given: Any,
) -> SamplingParams:
    """Return the sampling parameters: those of the body, then those of the checkpoint, then OpenAI's."""
    if max_tokens is None:
        room = served.max_length - max(map(len, prompts))
        max_tokens = min(room, served.defaults.get("max_new_tokens", default_max_tokens))
    _check_length(prompts, served, max_tokens)
    values = {field: value for field, value in served.defaults.items() if field != "max_new_tokens"}
    values |= {"max_tokens": max(max_tokens, 1), "n": fields.integer("n", 1, MAX_SAMPLES) or 1}
    values |= given | _read_lists(fields, served)
    number = {"temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0, 100)}
    number |= {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
    asked: dict[str, Any] = {field: fields.number(field, *limits) for field, limits in number.items()}
    asked["top_k"] = fields.integer("top_k", -1, 2**31 - 1)
    asked["seed"] = fields.integer("seed", -(2**63), 2**64 - 1)
    asked["min_tokens"] = fields.integer("min_tokens", 0, served.max_length)
    if asked["top_k"] == 0:
        asked["top_k"] = -1  # as other servers have it, 0 keeps all
    for field in ("ignore_eos", "include_stop_str_in_output"):
        asked[field] = fields.boolean(field)
    asked["skip_special_tokens"] = fields.boolean("skip_special_tokens", True)
    values |= {field: value for field, value in asked.items() if value is not None}
    num_samples = len(prompts) * (values.get("best_of") or values["n"])
    if num_samples > MAX_SAMPLES:
        raise BadRequest(f"n, best_of and prompts must make at most {MAX_SAMPLES} samples, got {num_samples}", "n")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise bad_parameter(error) from error


def _read_lists(fields: Fields, served: Served) -> dict[str, Any]:
    """Return the sampling parameters that hold several values."""

    def ids(name: str, most: int) -> list[int] | None:
        values = fields.items(name, most)
        if values is not None and not all(type(value) is int and 0 <= value < served.vocab_size for value in values):
            raise fields.refuse(name, f"made of token ids in [0, {served.vocab_size})")
        return values

    def strings(name: str, most: int, max_length: int) -> list[str] | None:
        value = fields.any(name)
        values = [value] if isinstance(value, str) else fields.items(name, most)
        if values is not None and not all(isinstance(each, str) and 0 < len(each) <= max_length for each in values):
            raise fields.refuse(name, f"made of strings of 1 to {max_length} characters")
        return values

    biases = fields.object("logit_bias") or {}
    if len(biases) > MAX_BIASES:
        raise fields.refuse("logit_bias", f"an object of at most {MAX_BIASES} token ids")
    for token, bias in biases.items():
        is_token = token.isdecimal() and token.isascii() and len(token) < 10 and int(token) < served.vocab_size
        if not is_token or isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 100:
            raise fields.refuse(
                "logit_bias", f"made of token ids in [0, {served.vocab_size}) with numbers in [-100, 100]"
            )
    return {
        "logit_bias": {int(token): bias for token, bias in biases.items()},
        "stop": strings("stop", MAX_STOPS, MAX_STOP_LENGTH),
        "bad_words": strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        "stop_token_ids": ids("stop_token_ids", MAX_STOP_TOKEN_IDS),
        "allowed_token_ids": ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
    }


def _read_constraint(fields: Fields, tool_schema: dict[str, Any] | None) -> Constraint | None:
    """Return what the answer must follow, by at most one of the fields that say so."""
    found = [] if tool_schema is None else [_schema_constraint(tool_schema, "tool_choice", "tools")]
    if (pattern := fields.text("guided_regex", MAX_REGEX_LENGTH)) is not None:
        found.append(Constraint(guided.Regex(pattern), "guided_regex"))
    if (choices := fields.items("guided_choice", MAX_CHOICES)) is not None:
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise fields.refuse("guided_choice", "one or more strings that are not empty")
        if sum(map(len, choices)) > MAX_CHOICES_LENGTH:
            raise BadRequest(f"guided_choice must have at most {MAX_CHOICES_LENGTH} characters", "guided_choice")
        found.append(Constraint(guided.Choices(choices), "guided_choice"))
    if (schema := fields.any("guided_json")) is not None:
        if isinstance(schema, str) and len(schema) <= MAX_SCHEMA_LENGTH:
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise fields.refuse("guided_json", "a JSON schema") from None
        found.append(_schema_constraint(schema, "guided_json", "guided_json"))
    found += _response_format(fields)
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise BadRequest(f"{names} must not be given together", found[1].param)
    return found[0] if found else None


def _response_format(fields: Fields) -> list[Constraint]:
    reader = fields.fields("response_format")
    if reader is None:
        return []
    reader.require("type", "one of text, json_object, json_schema")
    kind = reader.choice("type", ["text", "json_object", "json_schema"])
    constraints = []
    if kind == "json_object":
        constraints = [_schema_constraint({"type": "object"}, "response_format", "response_format")]
    if kind == "json_schema":
        reader.require("json_schema", "an object")
        described = reader.fields("json_schema")
        assert described is not None
        described.text("name", MAX_USER_LENGTH)
        described.text("description", MAX_TEXT_LENGTH)
        described.boolean("strict")
        schema, path = described.require("schema", "a JSON schema"), described.name("schema")
        constraints = [_schema_constraint(schema, "response_format", path)]
        described.finish()
    reader.finish()
    return constraints


def _schema_constraint(schema: Any, param: str, path: str) -> Constraint:
    """Return the constraint of a JSON schema; errors call it `path`."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{path} must be a JSON schema, an object, got {shown(schema)}", param)
    check_tree(schema, path, param)
    source = json.dumps(schema)
    if len(source) > MAX_SCHEMA_LENGTH:
        raise BadRequest(f"{path} must have at most {MAX_SCHEMA_LENGTH} characters, got {len(source)}", param)
    return Constraint(guided.JsonSchema(source), param)
