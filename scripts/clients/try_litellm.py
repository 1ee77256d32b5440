"""litellm, which sends each call in the protocol of a provider."""

from typing import Any, Literal

import litellm
from pydantic import BaseModel
from report import CITY, MODEL, URL, attempt

server: Any = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
asked: Any = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 64, **server}
function = {"name": "weather", "description": "Tell the weather.", "parameters": CITY}
litellm.suppress_debug_info = True


class Answer(BaseModel):
    colour: Literal["red", "green"]


@attempt("completion")
def _():
    assert litellm.completion(f"openai/{MODEL}", **asked).choices[0].message.content


@attempt("completion, stream")
def _():
    chunks = litellm.completion(f"openai/{MODEL}", stream=True, stream_options={"include_usage": True}, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@attempt("completion, the provider hosted_vllm")
def _():
    assert litellm.completion(f"hosted_vllm/{MODEL}", **asked).choices[0].message.content


@attempt("completion, a forced tool")
def _():
    choice = {"type": "function", "function": {"name": "weather"}}
    tools = [{"type": "function", "function": function}]
    answer = litellm.completion(f"openai/{MODEL}", tools=tools, tool_choice=choice, parallel_tool_calls=False, **asked)
    assert "city" in answer.choices[0].message.tool_calls[0].function.arguments


@attempt("completion, json_schema")
def _():
    answer = litellm.completion(f"openai/{MODEL}", response_format=Answer, **asked)
    Answer.model_validate_json(answer.choices[0].message.content)


@attempt("text_completion")
def _():
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def", max_tokens=8, **server)
    assert answer.choices[0].text


@attempt("responses")
def _():
    answer = litellm.responses(input="def add(a, b):", model=f"openai/{MODEL}", max_output_tokens=64, **server)
    assert answer.output[0].content[0].text


@attempt("completion, the provider anthropic")
def _():
    answer = litellm.completion(f"anthropic/{MODEL}", **asked | {"api_base": URL})
    assert answer.choices[0].message.content
