"""openai-agents: an agent with a tool, and one with a typed output, by both of its protocols."""

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from report import MODEL, URL, attempt

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
cities = []


class Answer(BaseModel):
    colour: Literal["red", "green"]


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather."""
    cities.append(city)
    return "rain"


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    name = "responses" if kind is OpenAIResponsesModel else "chat"

    def agent(kind: Any = kind, **options: Any) -> Agent:
        # The client takes an answer by Responses that reaches max_tokens for a failure, so a line ends each.
        choice = "required" if options.get("tools") else None
        settings = ModelSettings(max_tokens=64, temperature=0, tool_choice=choice, extra_body={"stop": ["\n", "("]})
        model = kind(model=MODEL, openai_client=client)
        return Agent(name="a", instructions="Python", model=model, model_settings=settings, **options)

    @attempt(f"run, {name}")
    def _(agent=agent):
        assert Runner.run_sync(agent(), "x = [1, 2, 3").final_output

    @attempt(f"run with a tool, {name}")
    def _(agent=agent):
        cities.clear()
        assert Runner.run_sync(agent(tools=[weather]), "def add(a, b):").final_output is not None and cities

    @attempt(f"run with a typed output, {name}")
    def _(agent=agent):
        assert isinstance(Runner.run_sync(agent(output_type=Answer), "def add(a, b):").final_output, Answer)
