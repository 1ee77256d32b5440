"""instructor, which parses answers; by each of its modes for OpenAI's protocol."""

from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from report import MODEL, URL, attempt

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
messages: Any = [{"role": "user", "content": "def add(a, b):"}]


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green"]


for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):

    @attempt(f"create, mode {mode}")
    def _(mode=mode):
        of_mode = instructor.from_openai(client, mode=instructor.Mode[mode])
        length = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 64}
        answer = of_mode.create(response_model=Answer, messages=messages, model=MODEL, max_retries=0, **length)
        assert isinstance(answer, Answer)
