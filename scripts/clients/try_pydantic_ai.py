"""pydantic-ai: an agent with text, and with a typed output by a tool and by a schema, by three protocols."""

from typing import Any, Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import MODEL, URL, attempt

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
protocols = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=anthropic),
}
settings: Any = {"max_tokens": 64}


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green"]


for name, model in protocols.items():

    @attempt(f"run, {name}")
    def _(model=model):
        assert Agent(model, instructions="Python").run_sync("def add(a, b):", model_settings=settings).output

    @attempt(f"run with a typed output by a tool, {name}")
    def _(model=model):
        agent = Agent(model, output_type=Answer)
        assert isinstance(agent.run_sync("def add(a, b):", model_settings=settings).output, Answer)

    if name != "messages":

        @attempt(f"run with a typed output by a schema, {name}")
        def _(model=model):
            agent = Agent(model, output_type=NativeOutput(Answer))
            assert isinstance(agent.run_sync("def add(a, b):", model_settings=settings).output, Answer)
