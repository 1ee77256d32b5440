"""The package anthropic, which speaks Anthropic's protocol."""

from typing import Any

from anthropic import Anthropic
from report import CITY, MODEL, URL, attempt

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "def add(a, b):"}]}
tools: Any = [{"name": "weather", "description": "Tell the weather.", "input_schema": CITY}]


@attempt("messages")
def _():
    answer = client.messages.create(system="Python", **asked)
    assert answer.content[0].text and answer.usage.output_tokens


@attempt("messages, stream")
def _():
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text


@attempt("messages, a forced tool and its result")
def _():
    answer = client.messages.create(tools=tools, tool_choice={"type": "tool", "name": "weather"}, **asked)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and call.name == "weather" and "city" in call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}
    history = [*asked["messages"], *turns]
    assert client.messages.create(tools=tools, **asked | {"messages": history}).stop_reason


@attempt("messages, stream of a forced tool")
def _():
    with client.messages.stream(tools=tools, tool_choice={"type": "any"}, **asked) as stream:
        (call,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
        assert "city" in call.input
