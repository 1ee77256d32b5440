"""Declare the bodies of requests, which the routes take, check and describe. `protocol` reads their meaning.

Every limit on sizes and counts is a constant of this module, of `messages` or of `tools`. The limits of a model, its
vocabulary and its maximum length, are arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specjax.sampling.capacities import Capacities
from specjax.server.fields import (
    Boolean,
    Choice,
    Either,
    Free,
    Integer,
    Kind,
    ListOf,
    Number,
    Object,
    Tagged,
    Text,
    Texts,
    TokenIds,
    Unsupported,
    refusal,
    token_ids,
    whole,
)
from specjax.server.messages import IGNORED, MAX_TEXT_LENGTH, MESSAGES, TEMPLATE_ARGUMENTS
from specjax.server.served import MAX_NAME_LENGTH
from specjax.server.tools import TOOL_FIELDS

MAX_PROMPTS = 128  # prompts of a body
MAX_SAMPLES = 128  # prompts times the larger of n and best_of
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # stop strings, and characters of one
MAX_STOP_TOKEN_IDS = Capacities.stop_tokens  # with the tokens that end a sequence of the model
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = Capacities.allowed_tokens
MAX_BAD_WORDS = Capacities.bad_words // 2  # which an engine forbids after a space, too
MAX_BAD_WORD_LENGTH = 64  # characters
MAX_TOP_LOGPROBS = 20
MAX_REGEX_LENGTH = 4096  # characters
MAX_SCHEMA_LENGTH = 2**16  # characters of a JSON schema as text
MAX_CHOICES, MAX_CHOICES_LENGTH = 256, 2**16  # choices, and characters of all together
MAX_USER_LENGTH = 512  # characters of user, and of other names that only label a request
MAX_ID_LENGTH = 128  # characters of a request_id
MAX_SALT_LENGTH = 1024  # characters of a cache_salt
MAX_PRIORITY = 2**31 - 1  # in both directions

LABEL = Text(MAX_USER_LENGTH, about="A label of the request, and nothing else.")
MODEL = Text(MAX_NAME_LENGTH, about="The name of the model; default: the first that /v1/models lists.")
SCHEMA = Free(about="A JSON schema.")
SCHEMA_TEXT = Either((SCHEMA, Text(MAX_SCHEMA_LENGTH)), about="A JSON schema, or its text.")
REGEX = Text(MAX_REGEX_LENGTH, about="A regular expression that the whole text matches.")
CHOICES = ListOf(
    Text(MAX_CHOICES_LENGTH, 1), MAX_CHOICES, least=1, noun="strings that are not empty", about="Texts to choose from."
)


@dataclass(frozen=True)
class Prompts(Kind):
    """One or more prompts, as texts or token ids; `read` returns a list of them."""

    vocab_size: int

    @property
    def expected(self) -> str:
        return f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"

    def read(self, value: Any, name: str) -> list[str | list[int]]:
        is_one = isinstance(value, str) or (isinstance(value, list) and value and whole(value[0]) is not None)
        given = [value] if is_one else value
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_PROMPTS:
            raise refusal(name, self.expected, value)
        prompts = []
        for prompt in given:
            is_text = isinstance(prompt, str) and len(prompt) <= MAX_TEXT_LENGTH
            ids = token_ids(prompt, self.vocab_size) if isinstance(prompt, list) else None
            if not is_text and ids is None:
                limits = f"with ids in [0, {self.vocab_size}) and strings of at most {MAX_TEXT_LENGTH} characters"
                raise refusal(name, f"{self.expected}, {limits}", value)
            prompts.append(prompt if is_text else ids)
        return prompts

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_LENGTH}
        ids = TokenIds(self.vocab_size, MAX_TEXT_LENGTH).schema() | {"minItems": 1}
        several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": MAX_PROMPTS}
        return {"anyOf": [text, ids, several]}


@dataclass(frozen=True)
class Biases(Kind):
    """Numbers by token ids, which are the names of an object's fields; `read` returns integers for them."""

    vocab_size: int

    @property
    def expected(self) -> str:
        return f"made of token ids in [0, {self.vocab_size}) with numbers in [-100, 100]"

    def read(self, value: Any, name: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise refusal(name, "an object", value)
        if len(value) > MAX_BIASES:
            raise refusal(name, f"an object of at most {MAX_BIASES} token ids", value)
        for token, bias in value.items():
            is_token = token.isdecimal() and token.isascii() and len(token) < 10 and int(token) < self.vocab_size
            if not is_token or isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 100:
                raise refusal(name, self.expected, value)
        return {int(token): bias for token, bias in value.items()}

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        }


RESPONSE_FORMAT = Tagged(
    "type",
    {
        "text": Object({}),
        "json_object": Object({}),
        "json_schema": Object(
            {
                "json_schema": Object(
                    {
                        "name": LABEL,
                        "description": Text(MAX_TEXT_LENGTH),
                        "strict": Boolean(about="The answer always follows the schema."),
                        "schema": SCHEMA,
                    },
                    ["schema"],
                )
            },
            ["json_schema"],
        ),
    },
    about="The form of the text.",
)
STRUCTURED_OUTPUTS = Object(
    {
        "json": SCHEMA_TEXT,
        "regex": REGEX,
        "choice": CHOICES,
        "json_object": Boolean(about="Whether the text is any JSON object."),
        "grammar": Unsupported(),
        "structural_tag": Unsupported(),
        "whitespace_pattern": Unsupported(),
        "disable_fallback": IGNORED,
        "disable_any_whitespace": Unsupported([False]),
        "disable_additional_properties": Unsupported([False]),
    },
    about="What the text must follow: one of json, regex, choice and json_object.",
)
GUIDED_FIELDS: dict[str, Kind] = {
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "guided_json": SCHEMA_TEXT,
    "guided_regex": REGEX,
    "guided_choice": CHOICES,
    "guided_grammar": Unsupported(),
}
STREAM_OPTIONS = Object(
    {
        "include_usage": Boolean(about="Whether the last chunk has the counts of tokens."),
        "continuous_usage_stats": Boolean(about="Whether every chunk has the counts of tokens so far."),
        "include_obfuscation": Unsupported([False]),
    },
    about="Only where stream is true.",
)
ANSWER_FIELDS: dict[str, Kind] = {
    "stream": Boolean(about="Whether the answer comes as server-sent events; default: false."),
    "stream_options": STREAM_OPTIONS,
    "return_token_ids": Boolean(about="Whether the answer has the token ids of the prompts and of the texts."),
    "return_token_kinds": Boolean(
        about="Whether a stream says of each token how it came about: accepted, recovered, bonus or target."
    ),
    "prompt_logprobs": Integer(
        0, MAX_TOP_LOGPROBS, about="How many of the likeliest tokens to list for each token of the prompt; no stream."
    ),
    "request_id": Text(
        MAX_ID_LENGTH,
        1,
        pattern="[A-Za-z0-9._-]+",
        noun=f"1 to {MAX_ID_LENGTH} letters, digits, points, hyphens and underscores",
        about="The end of the answer's id.",
    ),
    "priority": Integer(-MAX_PRIORITY, MAX_PRIORITY, about="Smaller numbers come first; default: 0."),
    "cache_salt": Text(
        MAX_SALT_LENGTH, 1, about="A secret: only requests with the same one share computed beginnings of prompts."
    ),
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "metadata": IGNORED,
    "store": Kind(about="Taken, and not used: nothing is stored."),
    "service_tier": IGNORED,
    "prompt_cache_retention": IGNORED,
}


def sampling_fields(vocab_size: int, max_length: int) -> dict[str, Kind]:
    """Return the fields that say how tokens are drawn and where a text ends."""
    return {
        "n": Integer(1, MAX_SAMPLES, about="Samples of each prompt; default: 1."),
        "temperature": Number(0, 2, about="0 is greedy; default: the checkpoint's, or 1."),
        "top_p": Number(0, 1, about="Probability mass to keep, above 0."),
        "top_k": Integer(-1, 2**31 - 1, about="How many of the likeliest tokens to keep; -1 and 0 keep all."),
        "min_p": Number(0, 1, about="Least probability to keep, relative to the likeliest token's."),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "repetition_penalty": Number(0, 100, about="Above 0."),
        "seed": Integer(-(2**63), 2**64 - 1, about="The same seed and body give the same tokens."),
        "logit_bias": Biases(vocab_size, about="Numbers that are added to logits, by token id."),
        "allowed_token_ids": TokenIds(vocab_size, MAX_ALLOWED_TOKEN_IDS, about="The only tokens of the text."),
        "bad_words": Texts(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH, about="Words that are not written."),
        "stop": Texts(MAX_STOPS, MAX_STOP_LENGTH, about="Texts before which the text ends."),
        "stop_token_ids": TokenIds(vocab_size, MAX_STOP_TOKEN_IDS, about="Tokens that end the text."),
        "include_stop_str_in_output": Boolean(about="Whether the text has the stop text at its end; default: false."),
        "min_tokens": Integer(0, max_length, about="Tokens before which no stop token follows."),
        "ignore_eos": Boolean(about="Whether the text goes on after an end-of-sequence token; default: false."),
        "skip_special_tokens": Boolean(about="Whether special tokens are left out of the text; default: true."),
        "spaces_between_special_tokens": Boolean(about="Default: true."),
        "truncate_prompt_tokens": Integer(
            -1, max_length, about="How many of the prompt's last tokens to use, from 1; -1 uses all that fit."
        ),
        "use_beam_search": Unsupported([False]),
        "length_penalty": Unsupported([1]),
    }


@cache
def completion(vocab_size: int, max_length: int) -> Object:
    """Return the declaration of a body of /v1/completions.

    Args:
        vocab_size: V of the model.
        max_length: the most tokens of a prompt and its answer.
    """
    fields: dict[str, Kind] = {
        "model": MODEL,
        "prompt": Prompts(vocab_size, about="What the model goes on with."),
        "max_tokens": Integer(0, max_length, about="Most tokens of a text; 0 only with echo; default: 16."),
        "best_of": Integer(1, MAX_SAMPLES, about="Samples of which the likeliest n are the answer."),
        "echo": Boolean(about="Whether the text begins with the prompt; default: false."),
        "logprobs": Integer(0, MAX_TOP_LOGPROBS, about="How many of the likeliest tokens to list for each token."),
        "add_special_tokens": Boolean(about="Whether texts get the tokenizer's special tokens; default: true."),
        "suffix": Unsupported([""]),
    }
    more = sampling_fields(vocab_size, max_length) | GUIDED_FIELDS | ANSWER_FIELDS
    return Object(fields | more, ["prompt"])


CHAT_FIELDS: dict[str, Kind] = {
    "messages": MESSAGES,
    **TOOL_FIELDS,
    "chat_template_kwargs": TEMPLATE_ARGUMENTS,
    "add_special_tokens": Boolean(about="Whether the tokenizer adds special tokens to the template's; default: false."),
    "add_generation_prompt": Unsupported([True]),
    "continue_final_message": Unsupported([False]),
    "chat_template": Unsupported(),
    "documents": Unsupported([[]]),
}


def thinking(required: Sequence[str] = ()) -> Tagged:
    """Return the declaration of `thinking`, whose type "enabled" requires some fields."""
    budget = Integer(1, 2**31 - 1, about="For templates that read a budget; max_tokens bounds thoughts and answer.")
    kinds = {
        "disabled": Object({}),
        "adaptive": Object({"display": IGNORED}),
        "enabled": Object({"budget_tokens": budget, "display": IGNORED}, required),
    }
    return Tagged("type", kinds, about="Whether to think, for chat templates that can be told.")


@cache
def chat(vocab_size: int, max_length: int) -> Object:
    """Return the declaration of a body of /v1/chat/completions; `completion` describes the arguments."""
    limit = Integer(1, max_length, about="Most tokens of the answer; default: all that fit.")
    fields: dict[str, Kind] = {
        "model": MODEL,
        "max_completion_tokens": limit,
        "max_tokens": limit,
        "logprobs": Boolean(about="Whether the answer has the log-probabilities of its tokens; default: false."),
        "top_logprobs": Integer(0, MAX_TOP_LOGPROBS, about="How many of the likeliest tokens to list for each token."),
        "reasoning_effort": Choice(
            ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
            about="How much to think, for chat templates that can be told.",
        ),
        "thinking": thinking(),
        "verbosity": IGNORED,
        "echo": Unsupported([False]),
        "audio": Unsupported(),
        "modalities": Unsupported([["text"]]),
        "prediction": Unsupported(),
        "web_search_options": Unsupported(),
        "functions": Unsupported(),
        "function_call": Unsupported(),
    }
    more = sampling_fields(vocab_size, max_length) | GUIDED_FIELDS | ANSWER_FIELDS
    return Object(fields | CHAT_FIELDS | more, ["messages"])


TOKENIZE = Object(
    {
        "model": MODEL,
        "prompt": Text(MAX_TEXT_LENGTH, about="The text; or messages, as a chat has them."),
        **CHAT_FIELDS,
        "return_token_strs": Boolean(about="Whether the answer has the text of each token."),
    }
)


@cache
def detokenize(vocab_size: int) -> Object:
    """Return the declaration of a body of /detokenize for a vocabulary."""
    return Object({"model": MODEL, "tokens": TokenIds(vocab_size, MAX_TEXT_LENGTH)}, ["tokens"])
