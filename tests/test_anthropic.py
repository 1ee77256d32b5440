"""Anthropic's Messages protocol: accepted and refused bodies, answers, and the order of events."""

import json

import pytest
from test_protocol import MAX_LENGTH, WEATHER, pieces_of, result_of, served
from test_responses import chat_prompt, telling

from specjax.server.anthropic import MessageAnswer, count_tokens, parse_message
from specjax.server.errors import ApiError, api_error
from specjax.server.fields import BadRequest

__all__ = ["served", "telling"]  # fixtures

TOOL = {"name": "weather", "input_schema": WEATHER}
OTHER = {"name": "time", "description": "now", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


def read(served, *messages, **fields):
    """The call of a body."""
    return parse_message({"model": "small", "max_tokens": 8, "messages": list(messages) or [USER], **fields}, served)


def prompt_of(served, *messages, **fields):
    """The text of the prompt of a body."""
    return served.tokenizer.decode(read(served, *messages, **fields).prompts[0], skip_special_tokens=False)


def events_of(content):
    """The events of a stream; the name of each is its type."""
    events = []
    for block in content.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream_of(served, call, result, pieces):
    """The events of a stream whose pieces come one by one."""
    answer = MessageAnswer(call, served)
    parts = [answer.start(), *(answer.feed([(0, piece)]) for piece in pieces), answer.finish([result])]
    return events_of(b"".join(parts))


def names_of(events):
    """The types of events, each that comes several times in a row once."""
    names = [each["type"] for each in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
TEXT = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TEXT += '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def ended(result, **how):
    return result._replace(completions=[result.completions[0]._replace(**how)])


class TestBodies:
    def test_every_field(self, served):
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x", "y"], "max_tokens": 7}
        more = {"metadata": {"user_id": "me"}, "stream": True, "service_tier": "auto", "thinking": {"type": "disabled"}}
        more |= {"cache_control": {"type": "ephemeral"}, "seed": 3, "min_p": 0.1, "request_id": "7"}
        call = read(served, **fields, **more)
        params = call.params
        assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ("x", "y"))
        assert (params.max_tokens, params.seed, params.min_p, params.n) == (7, 3, 0.1, 1)
        assert (call.user, call.stream, call.request_id, call.is_chat) == ("me", True, "7", True)
        assert (call.tools, call.constraint, call.top_logprobs) == (None, None, None)

    def test_fields_that_clients_send_unasked(self, served):
        keep = {"type": "clear_thinking_20251015", "keep": "all"}
        fields = {"thinking": {"type": "enabled", "budget_tokens": 31999}, "context_management": {"edits": [keep]}}
        assert read(served, **fields).prompts == read(served).prompts
        assert count_tokens({"messages": [USER]} | fields, served) == count_tokens({"messages": [USER]}, served)

    def test_a_conversation(self, telling):
        use = {
            "type": "tool_use",
            "id": "a",
            "name": "weather",
            "input": {"city": "Rome"},
            "caller": {"type": "direct"},
        }
        thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sun"}]}
        given = [
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]},
            {"role": "user", "content": [result | {"is_error": False}, {"type": "text", "text": "and"}]},
            {"role": "assistant", "content": [thought]},
            {"role": "user", "content": "then"},
        ]
        system = [
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind"},
        ]
        tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
        made = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        expected = [
            {"role": "system", "content": "be\nkind"},
            USER,
            {"role": "assistant", "content": "so", "tool_calls": [made], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
            {"role": "user", "content": "and\nthen"},
        ]
        assert prompt_of(telling, *given, system=system, tools=[TOOL]) == chat_prompt(telling, *expected, tools=[tool])

    def test_an_answer_without_content_comes_back(self, served):
        given = [USER, {"role": "assistant", "content": []}, {"role": "user", "content": "ho"}]
        assert prompt_of(served, *given) == chat_prompt(served, {"role": "user", "content": "hi\nho"})

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ({"type": "auto"}, (("weather", "time"), None, False, False)),
            ({"type": "auto", "disable_parallel_tool_use": True}, (("weather", "time"), None, False, True)),
            ({"type": "any"}, (("weather", "time"), None, True, False)),
            ({"type": "tool", "name": "time"}, (("time",), "time", False, False)),
        ],
    )
    def test_choice_of_a_tool(self, served, choice, expected):
        call = read(served, tools=[TOOL, OTHER], tool_choice=choice)
        tools = call.tools
        assert (tools.names, tools.forced, tools.is_required, tools.is_single) == expected
        assert (call.constraint is None) == (choice["type"] == "auto")
        assert read(served, tools=[TOOL], tool_choice={"type": "none"}).tools is None

    def test_form_of_the_text(self, served):
        config = {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}}
        constraint = read(served, output_config=config).constraint
        assert (json.loads(constraint.source.schema), constraint.param) == (WEATHER, "output_config")
        forced = read(served, output_config=config, tools=[OTHER], tool_choice={"type": "any"}).constraint
        assert json.loads(forced.source.schema) == {"type": "object"}  # a call is no text

    def test_the_maximum_length_may_end_an_answer_before_max_tokens(self, served):
        call = read(served, max_tokens=4096)
        assert call.params.max_tokens == MAX_LENGTH - len(call.prompts[0])
        body = MessageAnswer(call, served).body([result_of(served, ["the"])])
        assert body["stop_reason"] == "model_context_window_exceeded"
        with pytest.raises(BadRequest, match="prompt and answer must have at most"):
            read(served, {"role": "user", "content": "the cat " * MAX_LENGTH})

    def test_count_of_tokens(self, served):
        body = {"model": "small", "messages": [USER], "system": "be", "tools": [TOOL]}
        call = read(served, system="be", tools=[TOOL])
        assert count_tokens(body, served) == {"input_tokens": len(call.prompts[0])}

    @pytest.mark.parametrize(
        ("fields", "param", "told"),
        [
            ({"max_tokens": None}, "max_tokens", "missing"),
            ({"max_tokens": 0}, "max_tokens", "must be an integer"),
            ({"messages": []}, "messages", "one or more messages"),
            (
                {"messages": [USER, {"role": "assistant", "content": "so"}]},
                "messages",
                "must end with a message of the user",
            ),
            ({"messages": [{"role": "user", "content": []}]}, "messages", "a block that is no thinking"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of user, assistant, system"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                "messages[0].content[0].type",
                "one of text",
            ),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "no tools of its own"),
            ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "missing"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name", "one of the tools"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing"),
            ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management", "not sup"),
            ({"thread": {"type": "create"}}, "thread", "stores no conversations"),
            ({"container": "c"}, "container", "not supported"),
            ({"stop": ["x"]}, "stop", "unknown field"),
        ],
    )
    def test_refused(self, served, fields, param, told):
        with pytest.raises(BadRequest, match=told) as caught:
            parse_message({"model": "small", "max_tokens": 8, "messages": [USER]} | fields, served)
        assert caught.value.param == param
        error = api_error(caught.value).anthropic_body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


class TestAnswers:
    def test_text(self, served):
        call = read(served)
        result = result_of(served, ["the cat"], reason="stop", num_cached_tokens=1)
        body = MessageAnswer(call, served).body([result])
        assert body.pop("id").startswith("msg_") and body.pop("metrics")
        assert body == {
            "type": "message",
            "role": "assistant",
            "model": "small",
            "content": [{"type": "text", "text": "the cat"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(call.prompts[0]) - 1,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 1,
                "output_tokens": len(served.tokenizer.encode("the cat").ids),
            },
        }

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ({"finish_reason": "length"}, ("max_tokens", None)),
            ({"finish_reason": "stop"}, ("end_turn", None)),
            ({"finish_reason": "stop", "stop_reason": "cat"}, ("stop_sequence", "cat")),
            ({"finish_reason": "stop", "stop_reason": 7}, ("end_turn", None)),
        ],
    )
    def test_why_it_ended(self, served, how, expected):
        result = ended(result_of(served, ["the"]), **how)
        body = MessageAnswer(read(served), served).body([result])
        assert (body["stop_reason"], body["stop_sequence"]) == expected
        delta = stream_of(served, read(served), result, pieces_of(served, "the"))[-2]
        assert delta["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}

    def test_calls_of_tools(self, served):
        call = read(served, tools=[TOOL, OTHER])
        body = MessageAnswer(call, served).body([result_of(served, [TEXT], reason="stop")])
        text, *calls = body["content"]
        assert (text, body["stop_reason"]) == ({"type": "text", "text": "so:"}, "tool_use")
        assert [(each["type"], each["name"], each["input"]) for each in calls] == [
            ("tool_use", "weather", {"city": "Rome"}),
            ("tool_use", "time", {}),
        ]
        assert len({each["id"] for each in calls}) == 2

    def test_an_answer_without_text_has_no_content(self, served):
        assert MessageAnswer(read(served), served).body([result_of(served, [""], reason="stop")])["content"] == []


class TestEvents:
    def test_text(self, served):
        call, result = read(served), result_of(served, ["the cat sat"], reason="stop")
        events = stream_of(served, call, result, pieces_of(served, "the cat sat"))
        assert names_of(events) == ["message_start", "ping", *BLOCK, "message_delta", "message_stop"]
        begun = events[0]["message"]
        assert (begun["content"], begun["stop_reason"]) == ([], None)
        assert begun["usage"] == {"input_tokens": len(call.prompts[0]), "output_tokens": 0}
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        assert {each["type"] for each in deltas} == {"text_delta"} and len(deltas) > 1
        assert "".join(each["text"] for each in deltas) == "the cat sat"
        assert events[-2]["usage"] == MessageAnswer(call, served).body([result])["usage"]

    def test_text_and_calls(self, served):
        call = read(served, tools=[TOOL, OTHER])
        events = stream_of(served, call, result_of(served, [TEXT], reason="stop"), pieces_of(served, TEXT))
        assert names_of(events) == ["message_start", "ping", *BLOCK * 3, "message_delta", "message_stop"]
        begun = [each for each in events if each["type"] == "content_block_start"]
        assert [each["index"] for each in begun] == [0, 1, 2]
        assert begun[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
        deltas = [each for each in events if each["type"] == "content_block_delta" and each["index"]]
        assert {each["delta"]["type"] for each in deltas} == {"input_json_delta"} and len(deltas) > 4
        texts = ["".join(each["delta"]["partial_json"] for each in deltas if each["index"] == i) for i in (1, 2)]
        assert list(map(json.loads, texts)) == [{"city": "Rome"}, {}]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

    def test_a_call_without_an_end(self, served):
        """Nobody takes it for a call: the answer ends for the reason that it has without one."""
        call, text = read(served, tools=[TOOL]), TEXT[: TEXT.index("ome")]
        for reason, expected in (("length", "max_tokens"), ("stop", "end_turn")):
            events = stream_of(served, call, result_of(served, [text], reason=reason), pieces_of(served, text))
            assert names_of(events) == ["message_start", "ping", *BLOCK * 2, "message_delta", "message_stop"]
            assert events[-2]["delta"]["stop_reason"] == expected

    def test_an_answer_without_text(self, served):
        events = stream_of(served, read(served), result_of(served, [""], reason="stop"), [])
        assert names_of(events) == ["message_start", "ping", "message_delta", "message_stop"]

    def test_an_error(self, served):
        answer = MessageAnswer(read(served), served)
        *_, last = events_of(answer.start() + answer.fail(ApiError(503, "the engine has failed", code="engine_failed")))
        assert last == {"type": "error", "error": {"type": "api_error", "message": "the engine has failed"}}

    @pytest.mark.slow
    def test_types_of_the_client(self, served):
        """Every event and message is valid as the client's types declare them."""
        pytest.importorskip("anthropic")
        from anthropic.types import Message, RawMessageStreamEvent
        from pydantic import TypeAdapter

        adapter = TypeAdapter(RawMessageStreamEvent)
        call = read(served, tools=[TOOL, OTHER])
        result = result_of(served, [TEXT], reason="stop")
        for each in stream_of(served, call, result, pieces_of(served, TEXT)):
            if each["type"] != "ping":
                assert adapter.validate_python(each).type == each["type"]
        Message.model_validate(MessageAnswer(call, served).body([result]))
