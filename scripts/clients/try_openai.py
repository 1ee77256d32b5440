"""The package openai: all that the server has, by its own client."""

from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel
from report import CITY, MODEL, URL, attempt

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
messages: Any = [{"role": "user", "content": "def add(a, b):"}]
function: Any = {"name": "weather", "description": "Tell the weather.", "parameters": CITY}
short: Any = {"model": MODEL, "max_tokens": 64}
forced: Any = {"type": "function", "function": {"name": "weather"}}


class Answer(BaseModel):
    colour: Literal["red", "green"]
    is_dark: bool


@attempt("models")
def _():
    assert MODEL in [model.id for model in client.models.list()]


@attempt("completions")
def _():
    completion = client.completions.create(prompt="def add(a, b):", logprobs=2, **short)
    assert completion.choices[0].text and completion.usage.completion_tokens


@attempt("completions, stream")
def _():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="def add(a, b):", **options, **short))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) and chunks[-1].usage


@attempt("chat")
def _():
    assert client.chat.completions.create(messages=messages, **short).choices[0].message.content


@attempt("chat, stream")
def _():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=messages, **options, **short))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) and chunks[-1].usage


@attempt("chat, a forced tool and its result")
def _():
    tools: Any = [{"type": "function", "function": function}]
    answer = client.chat.completions.create(messages=messages, tools=tools, tool_choice=forced, **short)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and "city" in call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*messages, answer.choices[0].message, result]
    assert client.chat.completions.create(messages=history, tools=tools, **short).choices[0].finish_reason


@attempt("chat, json_schema")
def _():
    answer = client.chat.completions.parse(messages=messages, response_format=Answer, **short)
    assert isinstance(answer.choices[0].message.parsed, Answer)


asked: Any = {"model": MODEL, "input": "def add(a, b):", "max_output_tokens": 64}


@attempt("responses")
def _():
    assert client.responses.create(instructions="Python", **asked).output_text


@attempt("responses, stream")
def _():
    events = [event.type for event in client.responses.create(stream=True, **asked)]
    assert "response.output_text.delta" in events and events[-1] in ("response.completed", "response.incomplete")


@attempt("responses, stream of json_schema")
def _():
    with client.responses.stream(text_format=Answer, **asked) as stream:
        assert "response.output_text.delta" in [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Answer)


@attempt("responses, a forced tool and its result")
def _():
    tools: Any = [{"type": "function", **function}]
    answer = client.responses.create(tools=tools, tool_choice={"type": "function", "name": "weather"}, **asked)
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert call.name == "weather" and "city" in call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [{"role": "user", "content": "def"}, *answer.output, result]
    assert client.responses.create(tools=tools, **asked | {"input": history}).status


@attempt("responses, json_schema")
def _():
    assert isinstance(client.responses.parse(text_format=Answer, **asked).output_parsed, Answer)
