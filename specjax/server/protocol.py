"""Turn the bodies of OpenAI's completion requests into calls of an engine. Nothing here knows of HTTP.

`bodies` declares the fields of such a body, and `answers` makes the answers.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specjax.sampling import SamplingParams, guided
from specjax.server import bodies
from specjax.server.fields import BadRequest, Integer, Object, check_tree, missing, refusal, shown
from specjax.server.forms import is_thinking, parts_of
from specjax.server.harmony import FINAL
from specjax.server.messages import encode_chat, encode_text, template_arguments, template_messages
from specjax.server.parts import CLOSING, MakeParts, Plain
from specjax.server.served import Served
from specjax.server.thinking import thinking_values
from specjax.server.tools import Tools, choose_tools

__all__ = ["BadRequest", "Call", "Constraint", "bad_parameter", "parse_chat", "parse_completion"]

# Fields of a body that are arguments of `SamplingParams` by the same name.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "n",
    "best_of",
)


class Constraint(NamedTuple):
    """A grammar that the text of an answer must follow."""

    source: guided.Source  # source that an engine compiles to a grammar
    param: str  # the field of the body that asks for it


@dataclass(frozen=True)
class Call:
    """The meaning of the body of a request.

    Attributes:
        is_chat: whether it is of a chat.
        prompts: token ids of each prompt; a chat has one.
        prompt_texts: text of each prompt, empty where the answer does not echo it.
        params: sampling parameters, with the source of the grammar.
        model: the name of the model that the answer carries.
        constraint: the grammar that the answers must follow, None for free text.
        priority: requests with a smaller number come first.
        cache_salt: only requests with the same text share pages of prompts.
        request_id: the end of the answer's id; empty for a new one.
        stream: whether the answer is a stream.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether every chunk of the stream has the usage so far.
        echo: whether the text of a completion begins with its prompt.
        top_logprobs: how many of the most likely tokens the answer lists for each token; None has no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompts, which the answer lists by themselves.
        omits_output: whether nothing but the echo was asked for (max_tokens is 0); one token is generated all the same.
        has_token_ids: whether the answer has token ids.
        has_token_kinds: whether a stream says how each token came about.
        tools: the tools that the model may call.
        parts: parts the answer to a chat.
        user: the client's name for its user.
        repeated: fields that the answer repeats, in protocols whose answers repeat the request.
    """

    is_chat: bool
    prompts: tuple[list[int], ...]
    prompt_texts: tuple[str, ...]
    params: SamplingParams
    model: str
    constraint: Constraint | None = None
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    omits_output: bool = False
    has_token_ids: bool = False
    has_token_kinds: bool = False
    tools: Tools | None = None
    parts: MakeParts = Plain
    user: str | None = None
    repeated: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_completion(body: Any, served: Served) -> Call:
    """Read the body of a request for completions.

    Args:
        body: the parsed JSON.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range.
    """
    given = read(bodies.completion(served.vocab_size, served.max_length), body, served)
    echo, top, max_tokens = given.get("echo", False), given.get("logprobs"), given.get("max_tokens")
    if max_tokens == 0 and not echo:
        Integer(1, served.max_length).read(max_tokens, "max_tokens")
    answer = read_answer(given)
    if answer["stream"] and echo and top is not None:
        raise BadRequest("logprobs must be null in a stream with echo", "logprobs", "unsupported_parameter")
    prompts, texts = _encode_prompts(given, served, echo, max_tokens or 1)
    constraint = read_constraint(given, None)
    params = read_params(
        given,
        served,
        prompts,
        default_max_tokens=16,
        max_tokens=max_tokens,
        logprobs=top,
        prompt_logprobs=_larger(top if echo else None, given.get("prompt_logprobs")),
        guided_decoding=constraint and constraint.source,
    )
    if answer["stream"] and params.num_samples > params.n:
        raise refusal("best_of", f"n = {params.n} in a stream", params.best_of)
    more = {"echo": echo, "top_logprobs": top, "omits_output": max_tokens == 0}
    return Call(False, tuple(prompts), tuple(texts), params, constraint=constraint, **answer, **more)


def parse_chat(body: Any, served: Served) -> Call:
    """Read the body of a request for the answer to a conversation.

    Args:
        body: the parsed JSON.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range; or the chat template refuses
            the messages.
    """
    given = read(bodies.chat(served.vocab_size, served.max_length), body, served)
    tools, schema = choose_tools(given)
    top, has_logprobs = given.get("top_logprobs"), given.get("logprobs", False)
    if top and not has_logprobs:
        raise refusal("top_logprobs", "null or 0 unless logprobs is true", top)
    logprobs = (top or 0) if has_logprobs else None
    names = "max_completion_tokens", "max_tokens"
    limits = [given[name] for name in names if name in given]
    if len(set(limits)) > 1:
        raise refusal(names[1], f"{names[0]} = {limits[0]} or null", limits[1])
    constraint = read_constraint(given, schema)
    return chat_call(given, served, tools, constraint, max_tokens=limits[0] if limits else None, top_logprobs=logprobs)


def chat_call(
    given: Mapping[str, Any],
    served: Served,
    tools: Tools | None,
    constraint: Constraint | None,
    *,
    max_tokens: int | None,
    may_be_cut: bool = False,
    top_logprobs: int | None = None,
    repeated: Mapping[str, Any] | None = None,
) -> Call:
    """Return the call of a chat, whatever protocol its body was of.

    Args:
        given: the fields of a chat; protocols that call them otherwise translate theirs.
        served: the model that answers.
        tools: the tools that it may call.
        constraint: the grammar that the answer must follow.
        max_tokens: the most tokens of the answer, None for all that fit.
        may_be_cut: whether the maximum length may end the answer before `max_tokens` does; else that is an error.
        top_logprobs: as in `Call`.
        repeated: as in `Call`.

    Raises:
        BadRequest: the chat template refuses the messages, or a value is out of its range.
    """
    prompt = encode_messages(given, served, tools)
    if not prompt:  # of a template that writes nothing but their contents
        raise BadRequest("messages must make a prompt of one or more tokens, got none", "messages")
    parts, has_special = Plain, False
    if constraint is None:
        parts, has_special = parts_of(served, prompt, tools)
    elif served.is_harmony:  # the grammar is about the message for the user
        prompt = prompt + encode_text(served, FINAL, add_special_tokens=False)
    elif is_thinking(served, prompt):  # and about the text that follows the reasoning
        prompt = prompt + encode_text(served, f"\n{CLOSING}\n\n", add_special_tokens=False)
    if has_special:  # they part the answer
        given = {**given, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    prompt = _truncated(prompt, given, served, max_tokens or 1)
    check_length([prompt], served)
    if may_be_cut and max_tokens is not None:
        max_tokens = min(max_tokens, served.max_length - len(prompt))
    params = read_params(
        given,
        served,
        [prompt],
        default_max_tokens=served.max_length,
        max_tokens=max_tokens,
        logprobs=top_logprobs,
        prompt_logprobs=given.get("prompt_logprobs"),
        guided_decoding=constraint and constraint.source,
    )
    return Call(
        True,
        (prompt,),
        ("",),
        params,
        constraint=constraint,
        **read_answer(given),
        top_logprobs=top_logprobs,
        tools=tools,
        parts=parts,
        repeated=repeated or {},
    )


def tokenize(body: Any, served: Served) -> dict[str, Any]:
    """Return the answer to a body of /tokenize: the token ids of a prompt, or of the messages of a chat."""
    given = read(bodies.TOKENIZE, body, served)
    if "messages" in given:
        if "prompt" in given:
            raise BadRequest("prompt and messages must not be given together", "prompt")
        tokens = encode_messages(given, served, choose_tools(given)[0])
    elif "prompt" in given:
        tokens = encode_text(served, given["prompt"], given.get("add_special_tokens", True))
    else:
        raise missing("prompt", "a string")
    answer = {"count": len(tokens), "max_model_len": served.max_length, "tokens": tokens}
    if given.get("return_token_strs"):
        answer["token_strs"] = [served.token_text(token) for token in tokens]
    return answer


def detokenize(body: Any, served: Served) -> dict[str, Any]:
    """Return the answer to a body of /detokenize: the text of token ids."""
    given = read(bodies.detokenize(served.vocab_size), body, served)
    return {"prompt": served.tokenizer.decode(given["tokens"], skip_special_tokens=False)}


def encode_messages(given: Mapping[str, Any], served: Served, tools: Tools | None) -> list[int]:
    """Return the token ids of the messages of a body, with its tools and values for the template."""
    messages = template_messages(given["messages"])
    if served.is_harmony:
        messages = [_with_thinking(message) for message in messages]
    if served.numbers_calls:
        messages = _with_numbers(messages)
    arguments = template_arguments(given, () if served.checkpoint is None else served.checkpoint.special_tokens)
    return encode_chat(
        served,
        messages,
        tools and tools.described,
        thinking_values(given, served, bool(tools and tools.described)) | arguments,
        add_special_tokens=given.get("add_special_tokens", False),
    )


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as the template of gpt-oss takes it: with its reasoning, where it has no text beside calls."""
    reasoning = message.get("reasoning_content")
    if reasoning is None or (message["content"] and "tool_calls" in message):
        return message
    return {**message, "thinking": reasoning}


def _with_numbers(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have the ids of Kimi K2, whose template writes the name of a tool nowhere else."""
    found, ids, number = [], {}, 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = f"functions.{call['function']['name']}:{number}"
            calls.append({**call, "id": ids[call["id"]]})
            number += 1
        more = {"tool_calls": calls} if calls else {}
        if "tool_call_id" in message:
            more["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        found.append({**message, **more})
    return found


def bad_parameter(error: ValueError, constraint: Constraint | None = None) -> BadRequest:
    """Return the answer to a request that the engine refuses; its messages begin with the name of a parameter.

    Args:
        error: the error that the engine raised.
        constraint: the constraint of the request, to say which of its fields made the grammar.
    """
    if isinstance(error, BadRequest):
        return error
    message, code = str(error), "invalid_value"
    if constraint is not None and message.startswith("guided_decoding"):
        message, code = message.replace("guided_decoding", constraint.param, 1), "invalid_grammar"
    name = message.partition(" ")[0]
    return BadRequest(message, name if name.isidentifier() else None, code)


def read(declared: Object, body: Any, served: Served) -> dict[str, Any]:
    """Return the values of the fields of a body that are there, "model" among them.

    Args:
        declared: the declaration of the body.
        body: the parsed JSON.
        served: the model that answers.

    Raises:
        BadRequest: a field is not as it is declared, or the model has another name.
    """
    check_tree(body)
    given = declared.read(body)
    given.setdefault("model", served.name)
    if not served.is_called(given["model"]):
        names = " or ".join(map(repr, served.names))
        message = f"model must be {names}, got {shown(given['model'])}"
        raise BadRequest(message, "model", "model_not_found", status=404)
    return given


def _encode_prompts(
    given: Mapping[str, Any], served: Served, echo: bool, max_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of the prompts, and their texts if the answer needs them."""
    prompts, texts = [], []
    for prompt in given["prompt"]:
        is_text = isinstance(prompt, str)
        ids = encode_text(served, prompt, given.get("add_special_tokens", True)) if is_text else prompt
        if not ids:
            raise refusal("prompt", "one or more tokens", prompt)
        used = _truncated(ids, given, served, max_tokens)
        prompts.append(used)
        if not echo:
            texts.append("")
        elif is_text and len(used) == len(ids):
            texts.append(prompt)
        else:
            texts.append(served.tokenizer.decode(used, skip_special_tokens=False))
    check_length(prompts, served)
    return prompts, texts


def _truncated(ids: list[int], given: Mapping[str, Any], served: Served, max_tokens: int) -> list[int]:
    """Return the last token ids of a prompt, as many as `truncate_prompt_tokens` says."""
    limit = given.get("truncate_prompt_tokens", len(ids))
    if limit == 0:
        raise refusal("truncate_prompt_tokens", f"-1 or an integer in [1, {served.max_length}]", limit)
    if limit == -1:
        limit = max(served.max_length - max_tokens, 1)
    return ids[-limit:]


def check_length(prompts: Sequence[Sequence[int]], served: Served, max_tokens: int = 1) -> None:
    """Raise BadRequest unless the longest prompt leaves room for so many tokens."""
    longest = max(map(len, prompts))
    if longest + max_tokens > served.max_length:
        raise BadRequest(
            f"prompt and answer must have at most {served.max_length} tokens together, got a prompt of {longest} "
            f"and an answer of {max_tokens}",
            "max_tokens" if longest < served.max_length else None,
            "context_length_exceeded",
        )


def read_answer(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Call` that concern the answer and not the sampling."""
    stream, options = given.get("stream", False), given.get("stream_options")
    if options is not None and not stream:
        raise refusal("stream_options", "null unless stream is true", options)
    if stream and "prompt_logprobs" in given:
        raise BadRequest("prompt_logprobs must be null in a stream", "prompt_logprobs", "unsupported_parameter")
    has_kinds = given.get("return_token_kinds", False)
    if has_kinds and not stream:
        raise refusal("return_token_kinds", "false unless stream is true", True)
    options = options or {}
    return {
        "model": given["model"],
        "stream": stream,
        "include_usage": options.get("include_usage", False),
        "continuous_usage": options.get("include_usage", False) and options.get("continuous_usage_stats", False),
        "has_token_ids": given.get("return_token_ids", False),
        "has_token_kinds": has_kinds,
        "prompt_logprobs": given.get("prompt_logprobs"),
        "priority": given.get("priority", 0),
        "cache_salt": given.get("cache_salt", ""),
        "request_id": given.get("request_id", ""),
        "user": given.get("user"),
    }


def read_params(
    given: Mapping[str, Any],
    served: Served,
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """Return the sampling parameters: from the body, then from the checkpoint, then OpenAI's defaults.

    Args:
        given: the fields of the body.
        served: the model.
        prompts: the token ids of its prompts.
        default_max_tokens: the most tokens of an answer where neither body nor checkpoint says a number.
        max_tokens: the number of the body; 0 is one token that nobody sees.
        **more: further arguments of `SamplingParams`.

    Raises:
        BadRequest: a value is out of its range.
    """
    if max_tokens is None:
        room = served.max_length - max(map(len, prompts))
        max_tokens = min(room, served.defaults.get("max_new_tokens", default_max_tokens))
    check_length(prompts, served, max_tokens)
    values = {field: value for field, value in served.defaults.items() if field != "max_new_tokens"}
    values |= {"max_tokens": max(max_tokens, 1), "n": 1} | more
    values |= {field: given[field] for field in SAMPLING if field in given}
    if values.get("top_k") == 0:
        values["top_k"] = -1  # as other servers have it, 0 keeps all
    num_samples = len(prompts) * (values.get("best_of") or values["n"])
    if num_samples > bodies.MAX_SAMPLES:
        limit = f"at most {bodies.MAX_SAMPLES} samples, got {num_samples}"
        raise BadRequest(f"n, best_of and prompts must make {limit}", "n")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise bad_parameter(error) from error


def _larger(first: int | None, second: int | None) -> int | None:
    return max((each for each in (first, second) if each is not None), default=None)


def read_constraint(given: Mapping[str, Any], tool_schema: dict[str, Any] | None) -> Constraint | None:
    """Return the constraint on the answer, from at most one of the fields that may set it.

    Args:
        given: the fields of the body.
        tool_schema: the JSON schema of an answer that must call a tool.
    """
    found = [] if tool_schema is None else [schema_constraint(tool_schema, "tool_choice", "tools")]
    makers: dict[str, Callable[[Any, str], Constraint | None]] = {
        "regex": lambda value, path: Constraint(guided.Regex(value), path),
        "choice": _choice_constraint,
        "json": _json_constraint,
        "json_object": lambda value, path: schema_constraint({"type": "object"}, path, path) if value else None,
    }
    outputs = {name: value for name, value in given.get("structured_outputs", {}).items() if name in makers}
    asked = [(name, f"guided_{name}", given.get(f"guided_{name}")) for name in makers]
    asked += [(name, f"structured_outputs.{name}", value) for name, value in outputs.items()]
    made = [makers[name](value, path) for name, path, value in asked if value is not None]
    made.append(_format_constraint(given.get("response_format", {"type": "text"})))
    found += [constraint for constraint in made if constraint is not None]
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise BadRequest(f"{names} must not be given together", found[1].param)
    return found[0] if found else None


def _choice_constraint(choices: list[str], path: str) -> Constraint:
    if sum(map(len, choices)) > bodies.MAX_CHOICES_LENGTH:
        raise BadRequest(f"{path} must have at most {bodies.MAX_CHOICES_LENGTH} characters", path)
    return Constraint(guided.Choices(choices), path)


def _json_constraint(schema: Any, path: str) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise refusal(path, "a JSON schema", schema) from None
    return schema_constraint(schema, path, path)


def _format_constraint(form: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a `response_format`, None for free text."""
    if form["type"] == "json_object":
        return schema_constraint({"type": "object"}, "response_format", "response_format")
    if form["type"] == "json_schema":
        return schema_constraint(form["json_schema"]["schema"], "response_format", "response_format.json_schema.schema")
    return None


def schema_constraint(schema: Any, param: str, path: str) -> Constraint:
    """Return the constraint of a JSON schema; errors call it `path`."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{path} must be a JSON schema, an object, got {shown(schema)}", param)
    check_tree(schema, path, param)
    source = json.dumps(schema)
    if len(source) > bodies.MAX_SCHEMA_LENGTH:
        raise BadRequest(f"{path} must have at most {bodies.MAX_SCHEMA_LENGTH} characters, got {len(source)}", param)
    return Constraint(guided.JsonSchema(source), param)
