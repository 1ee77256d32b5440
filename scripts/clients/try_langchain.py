"""langchain-openai: its chat model, alone and with structured output by each method."""

from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from report import MODEL, URL, attempt

server: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_tokens": 64, "max_retries": 0}
chat = ChatOpenAI(**server)


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather."""
    return "rain"


@attempt("invoke")
def _():
    assert chat.invoke("def add(a, b):").content


@attempt("stream")
def _():
    assert "".join(chunk.text for chunk in chat.stream("def add(a, b):"))


for method in ("function_calling", "json_schema"):

    @attempt(f"with_structured_output, {method}")
    def _(method=method):
        assert isinstance(chat.with_structured_output(Answer, method=method).invoke("def add(a, b):"), Answer)


@attempt("bind_tools, a forced tool and its result")
def _():
    answer = chat.bind_tools([weather], tool_choice="any").invoke("def add(a, b):")
    (call,) = answer.tool_calls
    assert chat.bind_tools([weather]).invoke([("user", "def"), answer, weather.invoke(call)]).response_metadata


@attempt("invoke, by responses")
def _():
    assert ChatOpenAI(use_responses_api=True, **server).invoke("def add(a, b):").text
