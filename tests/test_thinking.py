"""How much to think: the words of each protocol, in the values that a chat template reads."""

from dataclasses import replace

import pytest
from test_parts import OF_HARMONY, served_with
from test_protocol import served

from specjax.engine import chat
from specjax.models.directory import Checkpoint
from specjax.server import anthropic, protocol, responses
from specjax.server.thinking import thinking_values

__all__ = ["served"]  # fixture

OFF, ADAPTIVE, ON = {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000}
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
DEFAULT = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
LEVEL = "{{ reasoning_effort }}"
TWO = "{% set known = ['none', 'high'] %}{% if reasoning_effort not in known %}{{ raise_exception('') }}{% endif %}"
THREE = "{% if not (reasoning_effort | lower) in ('no_think', 'low', 'high') %}{% endif %}"
BUDGET = "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}"


@pytest.mark.parametrize(
    ("template", "thinking", "effort", "expected"),
    [
        (SWITCH, None, None, {}),
        (SWITCH, OFF, None, {"enable_thinking": False}),
        (SWITCH, OFF, "high", {"enable_thinking": False}),
        (SWITCH, ON, None, {"enable_thinking": True}),
        (SWITCH, None, "none", {"enable_thinking": False}),
        (SWITCH, None, "minimal", {"enable_thinking": False}),
        (SWITCH, None, "low", {"enable_thinking": True}),
        (DEFAULT, ADAPTIVE, None, {"thinking": True}),
        (DEFAULT, OFF, None, {"thinking": False}),
        (LEVEL, None, "minimal", {"reasoning_effort": "minimal"}),
        (LEVEL, ADAPTIVE, "xhigh", {"reasoning_effort": "xhigh"}),
        (LEVEL, OFF, "xhigh", {"reasoning_effort": "none"}),
        (TWO, None, "minimal", {"reasoning_effort": "none"}),
        (TWO, None, "low", {"reasoning_effort": "high"}),
        (TWO, ADAPTIVE, None, {"reasoning_effort": "high"}),
        (THREE, None, "medium", {"reasoning_effort": "high"}),
        (THREE, None, "low", {"reasoning_effort": "low"}),
        (THREE, OFF, None, {"reasoning_effort": "no_think"}),
        (SWITCH + LEVEL, None, "max", {"enable_thinking": True, "reasoning_effort": "max"}),
        (SWITCH + LEVEL, None, "none", {"enable_thinking": False}),
        (BUDGET, ON, None, {"thinking_budget": 2000}),
        (BUDGET, None, "minimal", {"thinking_budget": 0}),
        (BUDGET, ADAPTIVE, "high", {}),
        ("{% set enable_thinking = true %}{{ enable_thinking }}", OFF, "none", {}),
        (
            "{% for m in messages %}{% if m.x %}{% set thinking = m.x %}{% endif %}{{ thinking }}{% endfor %}",
            ON,
            None,
            {},
        ),
        ("{% for %}", OFF, "none", {}),
    ],
)
def test_values_for_the_template(template, thinking, effort, expected, served, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    given = {"thinking": thinking, "reasoning_effort": effort}
    given = {name: value for name, value in given.items() if value is not None}
    assert thinking_values(given, replace(served, directory=tmp_path), has_tools=False) == expected


@pytest.mark.parametrize(("effort", "expected"), [("none", "low"), ("medium", "medium"), ("max", "high")])
def test_harmony_knows_three_levels(effort, expected, tmp_path):
    harmony = served_with(tmp_path / "x", OF_HARMONY)
    (tmp_path / "x" / "chat_template.jinja").write_text(LEVEL)
    assert thinking_values({"reasoning_effort": effort}, harmony, has_tools=False) == {"reasoning_effort": expected}


def test_each_protocol(served, tmp_path):
    """Whatever a client says, no model refuses it; values that it names for the template count in its place."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} {{ enable_thinking }}")
    other = replace(served, directory=tmp_path)

    def prompts(**fields):
        user = {"messages": [{"role": "user", "content": "a"}]}
        effort = fields.get("effort")
        more = {"chat_template_kwargs": fields["kwargs"]} if "kwargs" in fields else {}
        yield protocol.parse_chat(user | more | {"reasoning_effort": effort}, other)
        switch = {"type": "disabled" if effort == "none" else "enabled"}
        yield protocol.parse_chat(user | more | {"thinking": switch}, other)
        yield responses.parse_response({"input": "a", "reasoning": {"effort": effort}} | more, other)
        thinking = {"type": "disabled"} if effort == "none" else {"type": "enabled", "budget_tokens": 1024}
        yield anthropic.parse_message(user | more | {"max_tokens": 8, "thinking": thinking}, other)

    for fields, expected in (
        ({"effort": "none"}, "a False"),
        ({"effort": "high"}, "a True"),
        ({"effort": "none", "kwargs": {"enable_thinking": True}}, "a True"),
    ):
        texts = [served.tokenizer.decode(call.prompts[0]) for call in prompts(**fields)]
        assert texts == [expected] * 4
    user = {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "disabled"}}
    assert anthropic.count_tokens(user, other)["input_tokens"] == len(served.tokenizer.encode("a False").ids)


def test_conversations_with_tools_have_variables_of_their_own(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ enable_thinking }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ thinking }}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = [chat.variables(Checkpoint(tmp_path), has_tools) for has_tools in (False, True)]
    assert found == [{"enable_thinking": None}, {"thinking": None}]
