"""The Responses protocol: what is read, what is refused, answers, and the order of events."""

import json
import math

import pytest
from test_protocol import OTHER, TOOL, pieces_of, result_of, served
from test_protocol import chat as chat_call

from specjax.server.errors import ApiError
from specjax.server.responses import ResponseAnswer

__all__ = ["served"]  # the fixture


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


class TestAnswers:
    def test_text(self, served):
        call = chat_call(served)
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
        body = ResponseAnswer(chat_call(served), served).body([result_of(served, ["the"], reason="length")])
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (body["output"][0]["status"], body["completed_at"]) == ("incomplete", None)

    def test_calls_of_tools(self, served):
        call = chat_call(served, tools=[TOOL, OTHER])
        text = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        text += '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
        message, *calls = ResponseAnswer(call, served).body([result_of(served, [text], reason="stop")])["output"]
        assert message["content"][0]["text"] == "so:"
        assert [(each["type"], each["name"], each["arguments"]) for each in calls] == [
            ("function_call", "weather", '{"city": "Rome"}'),
            ("function_call", "time", "{}"),
        ]
        assert len({each["call_id"] for each in calls} | {each["id"] for each in calls}) == 4

    def test_an_answer_without_text_has_a_message(self, served):
        (message,) = ResponseAnswer(chat_call(served), served).body([result_of(served, [""], reason="stop")])["output"]
        assert message["content"][0]["text"] == ""

    def test_log_probabilities(self, served):
        call = chat_call(served, logprobs=True, top_logprobs=1)
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
        call, result = chat_call(served), result_of(served, ["the cat sat"], reason="stop")
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
        call = chat_call(served, tools=[TOOL, OTHER])
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
        call = chat_call(served, tools=[TOOL], tool_choice="required")
        text = '{"city": "Rome"}'
        events = stream_of(served, call, result_of(served, [text], reason="stop"), pieces_of(served, text))
        assert names_of(events) == ["created", "in_progress", *CALL_EVENTS, "completed"]

    def test_an_answer_without_text(self, served):
        events = stream_of(served, chat_call(served), result_of(served, [""], reason="stop"), [])
        names = [name for name in MESSAGE_EVENTS if name != "output_text.delta"]
        assert names_of(events) == ["created", "in_progress", *names, "completed"]

    def test_the_end_of_max_output_tokens(self, served):
        *_, last = stream_of(served, chat_call(served), result_of(served, ["a"]), pieces_of(served, "a"))
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")

    def test_an_error(self, served):
        answer = ResponseAnswer(chat_call(served), served)
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
        call = chat_call(served, tools=[TOOL, OTHER], logprobs=True, top_logprobs=1)
        text = 'so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'

        def entries(token):
            return {token: -1.0, 40: -math.inf}

        repeated = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        call = type(call)(**{**vars(call), "repeated": repeated})
        result = result_of(served, [text], entries, "stop")
        events = stream_of(served, call, result, pieces_of(served, text, entries))
        for each in events:
            assert adapter.validate_python(each).type == each["type"]
        responses.Response.model_validate(ResponseAnswer(call, served).body([result]))
