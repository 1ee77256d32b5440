"""The description of the operations holds for every request of schemathesis and its answer."""

import re
from dataclasses import replace

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks
from test_protocol import chat, completion, result_of, served
from test_server import engine, running

from specjax.server import answers, bodies
from specjax.server.anthropic import MessageAnswer, parse_message
from specjax.server.docs_page import docs_page
from specjax.server.fields import (
    BadRequest,
    Boolean,
    Choice,
    Either,
    Integer,
    ListOf,
    Object,
    Tagged,
    Text,
    Unsupported,
)
from specjax.server.operations import CHAT, COMPLETION, MESSAGE, RESPONSE, openapi, operations
from specjax.server.responses import ResponseAnswer, parse_response

__all__ = ["engine", "served"]  # fixtures

NUM_EXAMPLES = 5  # of each operation and kind of input
# All checks but the checks for independent fields: a body whose fields do not fit together is refused.
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
KINDS = [
    (Integer(1, 3), [1, 3.0], [0, 4, 1.5, True, "1"]),
    (Text(3, 1, pattern="[a-z]+"), ["a", "abc"], ["", "abcd", "A", 1]),
    (Choice(["a", "b"]), ["a"], ["c", 1]),
    (ListOf(Boolean(), 2, least=1), [[True], [False, True]], [[], [True] * 3, [1], True]),
    (Either((Integer(0, 1), ListOf(Integer(0, 1), 2))), [1, [0]], [2, [2], "a"]),
    (Unsupported([False, 1]), [False, 1], [True, 0, 2, "a"]),
    (Object({"a": Integer(0, 1)}, ["a"]), [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": None}, {"a": 1, "b": 2}, []]),
    (Object({"a": Integer(0, 1)}, is_open=True), [{}, {"a": None}, {"b": 2}], [{"a": 2}]),
    (
        Tagged("t", {"a": Object({"n": Text(1)}), "b": Object({})}),
        [{"t": "a", "n": "x"}],
        [{"t": "b", "n": "x"}, {}, {"t": 1}],
    ),
    (
        Tagged("t", {"a": Object({"n": Text(1)}, ["n"]), "b": Object({})}, default="a"),
        [{"n": "x"}, {"t": None, "n": "x"}, {"t": "a", "n": "x"}, {"t": "b"}],
        [{}, {"t": "b", "n": "x"}, {"t": "c", "n": "x"}],
    ),
    (bodies.Biases(300), [{"299": 1.5}, {}], [{"5": 101}, {"x": 1}, {"5": True}, []]),
    (bodies.Prompts(300), ["a", [1], [1.0, 2], ["a", [1]]], [[], [300], [[300]], 5, {}]),
]


@pytest.mark.parametrize(("kind", "good", "bad"), KINDS)
def test_kinds_take_what_their_schemas_take(kind, good, bad):
    validator = jsonschema_rs.Draft202012Validator(kind.schema())
    for value in good:
        kind.read(value, "field")
        assert validator.is_valid(value), value
    for value in bad:
        with pytest.raises(BadRequest):
            kind.read(value, "field")
        assert not validator.is_valid(value), value


def test_schemas_of_bodies_and_answers(served):
    described = openapi(operations(served), has_keys=True)
    for methods in described["paths"].values():
        for operation in methods.values():
            contents = [*operation["responses"].values(), operation.get("requestBody", {"content": {}})]
            for schema in (media["schema"] for each in contents for media in each["content"].values()):
                jsonschema_rs.Draft202012Validator(schema | {"components": described["components"]})
    assert (
        described["paths"]["/v1/models"]["get"]["security"] and "security" not in described["paths"]["/health"]["get"]
    )


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True, "prompt_logprobs": 1, "logprobs": 1, "n": 2}])
def test_answers_of_completions(served, fields):
    call = completion(served, prompt=[5, 6], **fields)
    result = result_of(served, ["x", "y"][: call.params.n], lambda token: {token: -1.0})
    result = result._replace(prompt_logprobs=[None, {6: -1.0, 8: -0.5}])
    jsonschema_rs.validate(COMPLETION, answers.answer(call, [result], answers.new_head(call), served))


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True, "logprobs": True, "top_logprobs": 1}])
def test_answers_of_chats(served, fields):
    call = chat(served, **fields)
    result = result_of(served, ["x"], lambda token: {token: -1.0, 40: -0.5})
    jsonschema_rs.validate(CHAT, answers.answer(call, [result], answers.new_head(call), served))


@pytest.mark.parametrize("text", ["x", '<tool_call>{"name": "at", "arguments": {"a": 1}}</tool_call>'])
def test_answers_of_other_protocols(served, text):
    tool = {"name": "at", "input_schema": {}}
    body = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    answer = MessageAnswer(parse_message(body, served), served)
    jsonschema_rs.validate(MESSAGE, answer.body([result_of(served, [text], reason="stop")]))
    body = {"model": "small", "input": "hi", "tools": [{"type": "function", "name": "at"}], "top_logprobs": 1}
    answer = ResponseAnswer(parse_response(body, served), served)
    jsonschema_rs.validate(RESPONSE, answer.body([result_of(served, [text], lambda token: {token: -1.0})]))


def test_the_page(served):
    described = openapi(operations(served), has_keys=False)
    page = docs_page(described)
    assert not re.search(r"<script|(src|href)=\"(?!openapi\.json)|https?:", page)
    assert all(f"<b>{path}</b>" in page for path in described["paths"])
    assert "<code>stop</code>" in page and "<code>suffix</code>" not in page
    assert page.count("<details>") == page.count("</details>")
    described["info"]["title"] = "<img>"
    assert "<img>" not in docs_page(described)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=strategies.data())
def probe(operation, mode, port, statuses, data):
    """Send what schemathesis makes up for an operation, check the answers, and collect their statuses."""
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call(base_url=f"http://127.0.0.1:{port}")
    statuses.add(response.status_code)
    case.validate_response(response, checks=CHECKS)


@pytest.mark.slow
def test_schemathesis(engine, served):
    served = replace(served, takes_any_name=True)  # else few bodies get further than the name
    schema = schemathesis.openapi.from_dict(openapi(operations(served), has_keys=False))
    answered = {}
    with running(engine, served) as client:
        for operation in (result.ok() for result in schema.get_all_operations()):
            statuses = answered.setdefault(operation.label, set())
            probe(operation, GenerationMode.POSITIVE, client.port, statuses)
            if operation.method == "post":
                probe(operation, GenerationMode.NEGATIVE, client.port, statuses)
    posted = [statuses for label, statuses in answered.items() if label.startswith("POST")]
    assert {200, 400} <= set().union(*posted)
