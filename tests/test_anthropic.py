"""Anthropic's Messages protocol: what is read, what is refused, answers, and the order of events."""

import json

import pytest
from test_protocol import OTHER, TOOL, pieces_of, result_of, served
from test_protocol import chat as chat_call

from specjax.server.anthropic import MessageAnswer
from specjax.server.errors import ApiError

__all__ = ["served"]  # the fixture


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


class TestAnswers:
    def test_text(self, served):
        call = chat_call(served)
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
        body = MessageAnswer(chat_call(served), served).body([result])
        assert (body["stop_reason"], body["stop_sequence"]) == expected
        delta = stream_of(served, chat_call(served), result, pieces_of(served, "the"))[-2]
        assert delta["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}

    def test_calls_of_tools(self, served):
        call = chat_call(served, tools=[TOOL, OTHER])
        body = MessageAnswer(call, served).body([result_of(served, [TEXT], reason="stop")])
        text, *calls = body["content"]
        assert (text, body["stop_reason"]) == ({"type": "text", "text": "so:"}, "tool_use")
        assert [(each["type"], each["name"], each["input"]) for each in calls] == [
            ("tool_use", "weather", {"city": "Rome"}),
            ("tool_use", "time", {}),
        ]
        assert len({each["id"] for each in calls}) == 2

    def test_an_answer_without_text_has_no_content(self, served):
        assert MessageAnswer(chat_call(served), served).body([result_of(served, [""], reason="stop")])["content"] == []


class TestEvents:
    def test_text(self, served):
        call, result = chat_call(served), result_of(served, ["the cat sat"], reason="stop")
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
        call = chat_call(served, tools=[TOOL, OTHER])
        events = stream_of(served, call, result_of(served, [TEXT], reason="stop"), pieces_of(served, TEXT))
        assert names_of(events) == ["message_start", "ping", *BLOCK * 3, "message_delta", "message_stop"]
        begun = [each for each in events if each["type"] == "content_block_start"]
        assert [each["index"] for each in begun] == [0, 1, 2]
        assert begun[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta" and each["index"]]
        assert [(each["type"], json.loads(each["partial_json"])) for each in deltas] == [
            ("input_json_delta", {"city": "Rome"}),
            ("input_json_delta", {}),
        ]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

    def test_an_answer_without_text(self, served):
        events = stream_of(served, chat_call(served), result_of(served, [""], reason="stop"), [])
        assert names_of(events) == ["message_start", "ping", "message_delta", "message_stop"]

    def test_an_error(self, served):
        answer = MessageAnswer(chat_call(served), served)
        *_, last = events_of(answer.start() + answer.fail(ApiError(503, "the engine has failed", code="engine_failed")))
        assert last == {"type": "error", "error": {"type": "api_error", "message": "the engine has failed"}}

    def test_types_of_the_client(self, served):
        """Every event and message is valid as the client's types declare them."""
        pytest.importorskip("anthropic")
        from anthropic.types import Message, RawMessageStreamEvent
        from pydantic import TypeAdapter

        adapter = TypeAdapter(RawMessageStreamEvent)
        call = chat_call(served, tools=[TOOL, OTHER])
        result = result_of(served, [TEXT], reason="stop")
        for each in stream_of(served, call, result, pieces_of(served, TEXT)):
            if each["type"] != "ping":
                assert adapter.validate_python(each).type == each["type"]
        Message.model_validate(MessageAnswer(call, served).body([result]))
