"""The Responses protocol: accepted and refused bodies, answers, and the order of events."""

import json
import math
from dataclasses import replace

import pytest
from test_protocol import WEATHER, pieces_of, result_of, served

from specjax.server import protocol
from specjax.server.errors import ApiError
from specjax.server.fields import BadRequest
from specjax.server.responses import ResponseAnswer, parse_response

__all__ = ["served"]  # a fixture

TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
OTHER = {"type": "function", "name": "time", "description": "now"}
SPACE = {"type": "namespace", "name": "clock", "description": "of clocks", "tools": [OTHER]}


def read(served, input="hi", **fields):
    """The call of a body."""
    return parse_response({"model": "small", "input": input, **fields}, served)


def prompt_of(served, input, **fields):
    """The text of the prompt of a body."""
    return served.tokenizer.decode(read(served, input, **fields).prompts[0], skip_special_tokens=False)


@pytest.fixture(scope="module")
def telling(served, tmp_path_factory):
    """A model whose prompt has all that its template is given."""
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "chat_template.jinja").write_text("{{ messages | tojson }}{{ tools | tojson }}")
    return replace(served, directory=directory, max_length=4000)


def chat_prompt(served, *messages, **fields):
    """The text of the prompt of a chat completion."""
    call = protocol.parse_chat({"model": "small", "messages": list(messages), **fields}, served)
    return served.tokenizer.decode(call.prompts[0], skip_special_tokens=False)


def events_of(content):
    """The events of a stream; the name of each is its type, and their numbers count up from 0."""
    events = []
    for block in content.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def stream_of(served, call, result, pieces):
    """The events of a stream whose pieces come one by one."""
    answer = ResponseAnswer(call, served)
    parts = [answer.start(), *(answer.feed([(0, piece)]) for piece in pieces), answer.finish([result])]
    return events_of(b"".join(parts))


def without_ids(value):
    """The value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "call_id", "completed_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
MESSAGE_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
CALL_EVENTS += ["output_item.done"]


def names_of(events):
    """The types of events, each that comes several times in a row once."""
    names = [each["type"].removeprefix("response.") for each in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


class TestBodies:
    def test_every_field(self, served):
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "max_output_tokens": 7, "seed": 3}
        labels = {"user": "me", "safety_identifier": "you", "prompt_cache_key": "k", "metadata": {"a": "b"}}
        more = {"stream": True, "store": True, "truncation": "disabled", "background": False, "request_id": "7"}
        more |= {"service_tier": "auto", "max_tool_calls": 3, "prompt_cache_retention": "24h", "include": []}
        more |= {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
        more |= {"stream_options": {"include_obfuscation": True}, "parallel_tool_calls": False}
        call = read(served, **fields, **labels, **more)
        params = call.params
        assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ("x",))
        assert (params.max_tokens, params.seed, params.n) == (7, 3, 1)
        assert (call.user, call.stream, call.request_id, call.is_chat) == ("me", True, "7", True)
        assert (call.tools, call.constraint, call.top_logprobs) == (None, None, None)
        body = ResponseAnswer(call, served).body([result_of(served, ["a"])])
        assert body.items() >= (labels | {"max_output_tokens": 7, "parallel_tool_calls": False, "store": False}).items()
        assert (body["id"], body["temperature"], body["text"]) == ("resp_7", 0.5, {"format": {"type": "text"}})

    def test_a_conversation(self, telling):
        """Items of former answers come back as they were, with all that they have."""
        call = read(telling, tools=[TOOL, OTHER])
        text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        output = ResponseAnswer(call, telling).body([result_of(telling, ["so: " + text + text], reason="stop")])[
            "output"
        ]
        given = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": each} for each in ("hm", "so")]},
            *output,
            *(
                {"type": "function_call_output", "call_id": each["call_id"], "output": "sun", "status": None}
                for each in output[1:]
            ),
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "alone"}]},
        ]
        tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
        made = [
            {
                "id": each["call_id"],
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
            for each in output[1:]
        ]
        expected = [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "so:", "tool_calls": made, "reasoning": "hm\nso"},
            *({"role": "tool", "tool_call_id": each["id"], "content": "sun"} for each in made),
            {"role": "user", "content": "a\nb"},
        ]
        assert prompt_of(telling, given, instructions="be", tools=[TOOL]) == chat_prompt(
            telling, *expected, tools=[tool]
        )

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ("auto", (("weather", "time"), None, False, False)),
            ("required", (("weather", "time"), None, True, False)),
            ({"type": "function", "name": "time"}, (("time",), "time", False, False)),
            (
                {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
                (("time",), None, False, False),
            ),
            (
                {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
                (("time",), "time", False, False),
            ),
        ],
    )
    def test_choice_of_a_tool(self, served, choice, expected):
        call = read(served, tools=[TOOL, OTHER], tool_choice=choice)
        tools = call.tools
        assert (tools.names, tools.forced, tools.is_required, tools.is_single) == expected
        assert (call.constraint is None) == (not (tools.forced or tools.is_required))
        assert (call.repeated["tools"], call.repeated["tool_choice"]) == ([TOOL, OTHER], choice)
        assert read(served, tools=[TOOL], tool_choice="none").tools is None
        assert read(served, tools=[TOOL], parallel_tool_calls=False).tools.is_single

    def test_functions_of_a_namespace(self, telling):
        """The model knows them by longer names, in descriptions and in former calls."""
        made = {"type": "function_call", "call_id": "a", "name": "time", "namespace": "clock", "arguments": "{}"}
        given = [{"role": "user", "content": "hi"}, made]
        function = {"name": "clock__time", "description": "now"}
        tool, called = {"type": "function", "function": function}, {"name": "clock__time", "arguments": "{}"}
        calls = [{"id": "a", "function": called}]
        expected = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
        assert prompt_of(telling, given, tools=[SPACE]) == chat_prompt(telling, *expected, tools=[tool])
        choice = {"type": "function", "name": "clock__time"}
        assert read(telling, tools=[TOOL, SPACE], tool_choice=choice).tools.forced == "clock__time"

    def test_fields_that_clients_send_unasked(self, served):
        search = {"type": "web_search", "external_web_access": False}
        call = read(served, tools=[TOOL, search], client_metadata={"a": "b"})
        assert (call.tools.names, call.repeated["tools"]) == (("weather",), [TOOL])

    def test_form_of_the_text(self, served):
        form = {"type": "json_schema", "name": "weather", "strict": True, "schema": WEATHER}
        constraint = read(served, text={"format": form}).constraint
        assert (json.loads(constraint.source.schema), constraint.param) == (WEATHER, "text")
        assert json.loads(read(served, text={"format": {"type": "json_object"}}).constraint.source.schema)
        forced = read(served, text={"format": form}, tools=[OTHER], tool_choice="required").constraint
        assert json.loads(forced.source.schema) == {"type": "object"}  # a call is no text

    @pytest.mark.parametrize(
        ("fields", "top"),
        [({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2), ({"top_logprobs": 0}, None)],
    )
    def test_log_probabilities(self, served, fields, top):
        assert read(served, **fields).top_logprobs == top

    @pytest.mark.parametrize(
        ("fields", "param", "told"),
        [
            ({"input": None}, "input", "missing"),
            ({"input": []}, "input", "one or more items"),
            ({"input": [{"type": "reasoning"}]}, "input", "no reasoning"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of user"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "stores nothing"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                "input[0].content[0].type",
                "nothing else",
            ),
            (
                {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]},
                "input[0].arguments",
                "a string",
            ),
            ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no answers"),
            ({"conversation": "c"}, "conversation", "stores no answers"),
            ({"background": True}, "background", "stores no answers"),
            ({"truncation": "auto"}, "truncation", "not supported"),
            ({"tools": [{"type": "file_search"}]}, "tools[0].type", "no tools of its own"),
            ({"tools": [{**SPACE, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type", "no tools of its own"),
            ({"tools": [SPACE, OTHER | {"name": "clock__time"}]}, "tools", "different names"),
            ({"tools": [TOOL, TOOL]}, "tools", "different names"),
            ({"tools": [SPACE | {"tools": [OTHER] * 512}] * 3}, "tools", "at most 1024 functions"),
            (
                {"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}},
                "tool_choice.name",
                "one of the tools",
            ),
            ({"tool_choice": "required"}, "tool_choice", "no tools"),
            (
                {
                    "tools": [TOOL],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "mode": "auto",
                        "tools": [{"type": "function", "name": "no"}],
                    },
                },
                "tool_choice.tools",
                "the name of one of the tools",
            ),
            ({"include": ["everything"]}, "include[0]", "one of"),
            ({"max_tokens": 3}, "max_tokens", "unknown field"),
            ({"n": 2}, "n", "unknown field"),
            ({"stream_options": {"include_obfuscation": False}}, "stream_options", "unless stream is true"),
        ],
    )
    def test_refused(self, served, fields, param, told):
        with pytest.raises(BadRequest, match=told) as caught:
            parse_response({"model": "small", "input": "hi"} | fields, served)
        assert caught.value.param == param


class TestAnswers:
    def test_text(self, served):
        call = read(served)
        body = ResponseAnswer(call, served).body([result_of(served, ["the cat"], reason="stop", num_cached_tokens=1)])
        (message,) = body["output"]
        assert without_ids(message) == {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "the cat", "annotations": [], "logprobs": []}],
        }
        assert (body["object"], body["status"], body["model"]) == ("response", "completed", "small")
        assert (body["error"], body["incomplete_details"], body["store"]) == (None, None, False)
        num_prompt, num_tokens = len(call.prompts[0]), len(served.tokenizer.encode("the cat").ids)
        assert body["usage"] == {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 1},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_tokens,
        }
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 4
        json.dumps(body, allow_nan=False)

    def test_the_end_of_max_output_tokens(self, served):
        body = ResponseAnswer(read(served), served).body([result_of(served, ["the"], reason="length")])
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (body["output"][0]["status"], body["completed_at"]) == ("incomplete", None)

    def test_calls_of_tools(self, served):
        call = read(served, tools=[TOOL, OTHER])
        text = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        text += '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
        message, *calls = ResponseAnswer(call, served).body([result_of(served, [text], reason="stop")])["output"]
        assert message["content"][0]["text"] == "so:"
        assert [(each["type"], each["name"], each["arguments"]) for each in calls] == [
            ("function_call", "weather", '{"city": "Rome"}'),
            ("function_call", "time", "{}"),
        ]
        assert len({each["call_id"] for each in calls} | {each["id"] for each in calls}) == 4

    def test_a_call_of_a_namespace(self, served):
        call = read(served, tools=[TOOL, SPACE])
        text = '<tool_call>{"name": "clock__time", "arguments": {}}</tool_call>'
        result = result_of(served, [text], reason="stop")
        (made,) = ResponseAnswer(call, served).body([result])["output"]
        assert (made["namespace"], made["name"]) == ("clock", "time")
        *_, done, item, last = stream_of(served, call, result, pieces_of(served, text))
        assert done["name"] == "time"
        assert without_ids(item["item"]) == without_ids(last["response"]["output"][0]) == without_ids(made)

    def test_an_answer_without_text_has_a_message(self, served):
        (message,) = ResponseAnswer(read(served), served).body([result_of(served, [""], reason="stop")])["output"]
        assert message["content"][0]["text"] == ""

    def test_log_probabilities(self, served):
        call = read(served, top_logprobs=1)
        result = result_of(served, ["a"], lambda token: {token: -2.0, 40: -0.5}, "stop")
        entries = ResponseAnswer(call, served).body([result])["output"][0]["content"][0]["logprobs"]
        assert [(each["token"], each["logprob"], each["bytes"]) for each in entries] == [("a", -2.0, [97])]
        assert [each["logprob"] for each in entries[0]["top_logprobs"]] == [-0.5]
        (delta,) = (
            each
            for each in stream_of(served, call, result, pieces_of(served, "a", lambda token: {token: -2.0, 40: -0.5}))
            if each["type"] == "response.output_text.delta"
        )
        assert delta["logprobs"] == entries


class TestEvents:
    def test_text(self, served):
        call, result = read(served), result_of(served, ["the cat sat"], reason="stop")
        events = stream_of(served, call, result, pieces_of(served, "the cat sat"))
        assert names_of(events) == ["created", "in_progress", *MESSAGE_EVENTS, "completed"]
        deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert len(deltas) > 1 and "".join(deltas) == "the cat sat"
        created, last = events[0]["response"], events[-1]["response"]
        assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
        assert created["id"] == last["id"]
        assert without_ids(last) == without_ids(ResponseAnswer(call, served).body([result]) | {"id": last["id"]})
        assert last["output"] == [each["item"] for each in events if each["type"] == "response.output_item.done"]
        places = {(each["item_id"], each["output_index"]) for each in events if "item_id" in each}
        assert places == {(last["output"][0]["id"], 0)}

    def test_text_and_calls(self, served):
        call = read(served, tools=[TOOL, OTHER])
        text = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        text += '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
        events = stream_of(served, call, result_of(served, [text], reason="stop"), pieces_of(served, text))
        assert names_of(events) == ["created", "in_progress", *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS, "completed"]
        assert [each["output_index"] for each in events if each["type"] == "response.output_item.done"] == [0, 1, 2]
        begun = [each["item"] for each in events if each["type"] == "response.output_item.added"][1:]
        assert [(each["status"], each["arguments"]) for each in begun] == [("in_progress", "")] * 2
        done = events[-1]["response"]["output"]
        assert [each["status"] for each in done] == ["completed"] * 3
        assert [each["id"] for each in begun] == [each["id"] for each in done[1:]]
        assert "".join(each["delta"] for each in events if each["type"].endswith("text.delta")) == "so: "

    def test_a_call_alone(self, served):
        call = read(served, tools=[TOOL], tool_choice="required")
        text = '{"city": "Rome"}'
        events = stream_of(served, call, result_of(served, [text], reason="stop"), pieces_of(served, text))
        assert names_of(events) == ["created", "in_progress", *CALL_EVENTS, "completed"]

    def test_a_call_without_an_end(self, served):
        call, text = read(served, tools=[TOOL]), 'a <tool_call>{"name": "weather", "arguments": {"city": "Ro'
        events = stream_of(served, call, result_of(served, [text]), pieces_of(served, text))
        assert names_of(events) == ["created", "in_progress", *MESSAGE_EVENTS, *CALL_EVENTS, "incomplete"]
        message, made = events[-1]["response"]["output"]
        assert (message["status"], made["status"], made["arguments"]) == ("completed", "incomplete", '{"city": "Ro')
        assert made["arguments"] == "".join(each["delta"] for each in events if "arguments.delta" in each["type"])

    def test_an_answer_without_text(self, served):
        events = stream_of(served, read(served), result_of(served, [""], reason="stop"), [])
        names = [name for name in MESSAGE_EVENTS if name != "output_text.delta"]
        assert names_of(events) == ["created", "in_progress", *names, "completed"]

    def test_the_end_of_max_output_tokens(self, served):
        *_, last = stream_of(served, read(served), result_of(served, ["a"]), pieces_of(served, "a"))
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")

    def test_an_error(self, served):
        answer = ResponseAnswer(read(served), served)
        begun = answer.start() + answer.feed([(0, piece) for piece in pieces_of(served, "a")])
        *_, last = events_of(begun + answer.fail(ApiError(503, "the engine has failed", code="engine_failed")))
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "the engine has failed"}

    def test_types_of_the_client(self, served):
        """Every event and response is valid as the client's types declare them."""
        pytest.importorskip("openai")
        from openai.types import responses
        from pydantic import TypeAdapter

        adapter = TypeAdapter(responses.ResponseStreamEvent)
        call = read(served, tools=[TOOL, OTHER], top_logprobs=1)
        text = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'

        def entries(token):
            return {token: -1.0, 40: -math.inf}

        result = result_of(served, [text], entries, "stop")
        events = stream_of(served, call, result, pieces_of(served, text, entries))
        for each in events:
            assert adapter.validate_python(each).type == each["type"]
        responses.Response.model_validate(ResponseAnswer(call, served).body([result]))
