"""List the operations of the server, with their bodies and answers, and describe them in the form of OpenAPI.

The routes, /openapi.json and /docs come from this list, and the bodies in it are those that the server checks.
"""

from typing import Any, NamedTuple

from specjax.server import anthropic, bodies, responses
from specjax.server.fields import Kind
from specjax.server.served import Served
from specjax.version import __version__

STRING, INTEGER, NUMBER, ANY = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {}
BOOLEAN = {"type": "boolean"}
STRINGS, INTEGERS = {"type": "array", "items": STRING}, {"type": "array", "items": INTEGER}


class Operation(NamedTuple):
    """A method and path for clients, with its body and answer."""

    method: str
    path: str
    about: str  # its purpose, in a sentence
    answer: dict[str, Any]  # JSON schema of the answer
    body: Kind | None = None  # declaration of the body; None takes none
    is_stream: bool = False  # whether the answer may be server-sent events
    media_type: str = "application/json"  # of the answer
    is_open: bool = False  # whether it needs no key
    errors: tuple[int, ...] = ()  # statuses beyond those that all operations, and all with a body, may have
    error: str = "Error"  # name of the schema of its errors


def record(optional: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these fields and no others.

    Args:
        optional: the schemas of fields that may be absent.
        **fields: the schemas of those that are always there.
    """
    properties = fields | (optional or {})
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of what another one takes, and null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a list."""
    return {"type": "array", "items": items}


ERROR = record(error=record(message=STRING, type=STRING, param=nullable(STRING), code=nullable(STRING)))
ANTHROPIC_ERROR = record(type={"const": "error"}, error=record(type=STRING, message=STRING))
MODEL_CARD = record(
    id=STRING,
    object={"const": "model"},
    created=INTEGER,
    owned_by=STRING,
    root=STRING,
    max_model_len=INTEGER,
    num_draft_tokens=INTEGER,
    verifier=STRING,
    chat=BOOLEAN,
)
USAGE = record(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=record(cached_tokens=INTEGER),
)
DRAFTS = record(
    speculative_decoding=record(
        {"mean_acceptance_length": NUMBER, "acceptance_rate_per_position": array(nullable(NUMBER))},
        num_spec_tokens=INTEGER,
        num_steps=INTEGER,
        num_draft_tokens=INTEGER,
        num_accepted_draft_tokens=INTEGER,
        draft_acceptance_rate=NUMBER,
    )
)
PROMPT_LOGPROBS = array(
    nullable(
        {
            "type": "object",
            "additionalProperties": record(logprob=NUMBER, rank=nullable(INTEGER), decoded_token=STRING),
        }
    )
)
ENDED = {
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": {"type": ["integer", "string", "null"]},
}
NUMBERS = {"type": "object", "additionalProperties": NUMBER}
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": INTEGERS}
TOOL_CALL = record(id=STRING, type={"const": "function"}, function=record(name=STRING, arguments=STRING))
HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING, "usage": USAGE}


def answer_of(kind: str, choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an answer with choices."""
    return record({"metrics": DRAFTS} | more, **HEAD, object={"const": kind}, choices=array(choice))


COMPLETION = answer_of(
    "text_completion",
    record(
        {"token_ids": INTEGERS, "prompt_token_ids": INTEGERS, "prompt_logprobs": PROMPT_LOGPROBS},
        index=INTEGER,
        text=STRING,
        logprobs=nullable(
            record(
                tokens=STRINGS,
                token_logprobs=array(nullable(NUMBER)),
                top_logprobs=array(nullable(NUMBERS)),
                text_offset=INTEGERS,
            )
        ),
        **ENDED,
    ),
    {},
)
REASONING = {"reasoning": STRING, "reasoning_content": STRING}
CHAT = answer_of(
    "chat.completion",
    record(
        {"token_ids": INTEGERS},
        index=INTEGER,
        message=record(
            {"tool_calls": array(TOOL_CALL), **REASONING}, role={"const": "assistant"}, content=nullable(STRING)
        ),
        logprobs=nullable(
            record(content=array(record(**TOKEN, top_logprobs=array(record(**TOKEN)))), refusal={"type": "null"})
        ),
        **ENDED,
    ),
    {"prompt_token_ids": INTEGERS, "prompt_logprobs": PROMPT_LOGPROBS},
)
EVENT = {
    "type": "object",
    "description": "One of the events of a stream, with JSON as its data.",
    "properties": {"data": STRING},
    "required": ["data"],
}
LOGPROBS = array(record(**TOKEN, top_logprobs=array(record(**TOKEN))))
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
RESPONSE = record(
    {"metrics": DRAFTS},
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=nullable(INTEGER),
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
    background={"const": False},
    error=nullable(record(code=STRING, message=STRING)),
    incomplete_details=nullable(record(reason={"const": "max_output_tokens"})),
    model=STRING,
    output=array(
        {
            "anyOf": [
                record(
                    id=STRING,
                    type={"const": "message"},
                    status=STATUS,
                    role={"const": "assistant"},
                    content=array(
                        record(
                            type={"const": "output_text"},
                            text=STRING,
                            annotations={"type": "array", "maxItems": 0},
                            logprobs=LOGPROBS,
                        )
                    ),
                ),
                record(
                    id=STRING,
                    type={"const": "reasoning"},
                    status=STATUS,
                    summary={"type": "array", "maxItems": 0},
                    content=array(record(type={"const": "reasoning_text"}, text=STRING)),
                ),
                record(
                    {"namespace": STRING},
                    id=STRING,
                    type={"const": "function_call"},
                    status=STATUS,
                    call_id=STRING,
                    name=STRING,
                    arguments=STRING,
                ),
            ]
        }
    ),
    previous_response_id={"type": "null"},
    service_tier=STRING,
    store={"const": False},
    temperature=NUMBER,
    top_p=NUMBER,
    top_logprobs=INTEGER,
    truncation=STRING,
    usage=nullable(
        record(
            input_tokens=INTEGER,
            input_tokens_details=record(cache_write_tokens=INTEGER, cached_tokens=INTEGER),
            output_tokens=INTEGER,
            output_tokens_details=record(reasoning_tokens=INTEGER),
            total_tokens=INTEGER,
        )
    ),
    instructions=nullable(STRING),
    max_output_tokens=nullable(INTEGER),
    metadata={"type": "object"},
    parallel_tool_calls={"type": "boolean"},
    reasoning={"type": "object"},
    text={"type": "object"},
    tool_choice=ANY,
    tools=array({"type": "object"}),
    user=nullable(STRING),
    safety_identifier=nullable(STRING),
    prompt_cache_key=nullable(STRING),
)
MESSAGE = record(
    {"metrics": DRAFTS},
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=array(
        {
            "anyOf": [
                record(type={"const": "thinking"}, thinking=STRING, signature=STRING),
                record(type={"const": "text"}, text=STRING),
                record(type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"}),
            ]
        }
    ),
    stop_reason={"enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]},
    stop_sequence=nullable(STRING),
    usage=record(
        input_tokens=INTEGER,
        cache_creation_input_tokens=INTEGER,
        cache_read_input_tokens=INTEGER,
        output_tokens=INTEGER,
    ),
)
HTML, TEXT = "text/html", "text/plain"


def operations(served: Served) -> list[Operation]:
    """Return the operations of the server of a model."""
    limits = served.vocab_size, served.max_length
    status = record(status=STRING)
    get, post = "GET", "POST"
    told_as = "AnthropicError"
    return [
        Operation(post, "/v1/completions", "Continue texts.", COMPLETION, bodies.completion(*limits), True),
        Operation(post, "/v1/chat/completions", "Answer a conversation.", CHAT, bodies.chat(*limits), True),
        Operation(
            post,
            "/v1/responses",
            "Answer a conversation, as OpenAI's Responses.",
            RESPONSE,
            responses.response(*limits),
            True,
        ),
        Operation(
            post,
            "/v1/messages",
            "Answer a conversation, as Anthropic's Messages.",
            MESSAGE,
            anthropic.message(*limits),
            True,
            error=told_as,
        ),
        Operation(
            post,
            "/v1/messages/count_tokens",
            "Count the tokens of a conversation.",
            record(input_tokens=INTEGER),
            anthropic.COUNT,
            error=told_as,
        ),
        Operation(
            get,
            "/v1/models",
            "List the names of the model.",
            record(object={"const": "list"}, data=array(MODEL_CARD)),
        ),
        Operation(get, "/v1/models/{name:path}", "Tell how the model is served.", MODEL_CARD, errors=(404,)),
        Operation(
            post,
            "/tokenize",
            "Return the token ids of a prompt, or of the messages of a chat.",
            record({"token_strs": STRINGS}, count=INTEGER, max_model_len=INTEGER, tokens=INTEGERS),
            bodies.TOKENIZE,
        ),
        Operation(
            post,
            "/detokenize",
            "Return the text of token ids.",
            record(prompt=STRING),
            bodies.detokenize(served.vocab_size),
        ),
        Operation(get, "/tokenizer_info", "Return the settings of the tokenizer.", {"type": "object"}),
        Operation(get, "/metrics", "Return the numbers of the server for Prometheus.", STRING, media_type=TEXT),
        Operation(get, "/health", "Tell whether the server takes requests.", status, is_open=True, errors=(503,)),
        Operation(get, "/version", "Return the version of specjax.", record(version=STRING)),
        Operation(get, "/", "Show a page to try the model.", STRING, media_type=HTML, is_open=True),
        Operation(get, "/docs", "Show a page that describes the operations.", STRING, media_type=HTML),
        Operation(get, "/openapi.json", "Return this description.", {"type": "object"}),
    ]


STATUSES = {
    400: "The request is not as it must be; the message says what is wrong.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The body is too slow.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too many requests wait.",
    431: "The headers are too long.",
    503: "The server is ending, the engine has failed, or the request took too long.",
}
OF_ALL, OF_BODIES = (400, 401, 431), (404, 408, 413, 415, 503)


def openapi(listed: list[Operation], has_keys: bool) -> dict[str, Any]:
    """Return the description of operations in the form of OpenAPI 3.1.

    Args:
        listed: the operations.
        has_keys: whether clients need a key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for each in listed:
        paths.setdefault(each.path.replace(":path", ""), {})[each.method.lower()] = _described(each, has_keys)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}}
        | ({"securitySchemes": schemes} if has_keys else {}),
    }


def _described(operation: Operation, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": operation.answer}}
    if operation.is_stream:
        content["text/event-stream"] = {"schema": EVENT}
    statuses = {*OF_ALL, *operation.errors, *(OF_BODIES if operation.body else ())}
    statuses |= {429} if operation.is_stream else set()
    if not has_keys or operation.is_open:
        statuses.discard(401)
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{operation.error}"}}}
    responses = {str(status): {"description": STATUSES[status], "content": failure} for status in sorted(statuses)}
    found: dict[str, Any] = {
        "summary": operation.about,
        "responses": {"200": {"description": "The answer.", "content": content}} | responses,
    }
    if operation.body is not None:
        declared = {"application/json": {"schema": operation.body.schema()}}
        found["requestBody"] = {"required": True, "content": declared}
    if "{name" in operation.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": STRING}]
    if has_keys and not operation.is_open:
        found["security"] = [{"key": []}]
    return found
