"""How much a model thinks: the words of the protocols, in the values that the model's chat template reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.engine import chat
from specjax.server.served import Served

SWITCHES = ("enable_thinking", "thinking", "reasoning")  # true or false, in the templates of different families
LEVELS = ("reasoning_effort", "thinking_effort")  # one of `EFFORTS`
BUDGET = "thinking_budget"  # tokens, 0 for none
EFFORTS = {"none": 0, "no_think": 0, "minimal": 1, "low": 2, "medium": 3, "high": 4, "xhigh": 5, "max": 6}
LEAST = EFFORTS["low"]  # that is thinking where a template can only be told whether to think
OF_HARMONY = ("low", "medium", "high")  # that gpt-oss knows; its template writes any


def thinking_values(given: Mapping[str, Any], served: Served, has_tools: bool) -> dict[str, Any]:
    """Return the values for the chat template that say how much to think, none where the request does not say it.

    A template that has a switch gets true or false. One that reads a level gets it; where the template knows only some
    levels, the nearest of these. Other templates get nothing: their models think as they always do.

    Args:
        given: the fields of the request: `reasoning_effort`, and `thinking` as Anthropic's protocol has it.
        served: the model.
        has_tools: whether the request has tools, for which there may be another template.
    """
    effort: str | None = given.get("reasoning_effort")
    thinking: Mapping[str, Any] = given.get("thinking", {})
    if served.checkpoint is None or (effort is None and not thinking):
        return {}
    try:
        known = chat.variables(served.checkpoint, has_tools)
    except ValueError:  # rendering says it
        return {}
    is_off = thinking.get("type") == "disabled" or (not thinking and effort is not None and EFFORTS[effort] < LEAST)
    found: dict[str, Any] = {name: not is_off for name in SWITCHES if name in known}
    if is_off:
        effort = None if found else "none" if thinking else effort
    elif effort is None and not found:  # a template whose default is not to think
        effort = "medium"
    for name in LEVELS:
        if effort is not None and name in known:
            found[name] = _nearest(effort, OF_HARMONY if served.is_harmony else known[name])
    if BUDGET in known and (is_off or "budget_tokens" in thinking):
        found[BUDGET] = 0 if is_off else thinking["budget_tokens"]
    return found


def _nearest(effort: str, known: Sequence[str] | None) -> str:
    """Return the effort among those that a template knows that is nearest, on the same side of `LEAST` if there is one.

    The larger of two that are as near wins. Where a template names none, it is the effort itself.
    """
    wanted = EFFORTS[effort]

    def distance(other: str) -> tuple[bool, int, int]:
        number = EFFORTS[other]
        return (number < LEAST) != (wanted < LEAST), abs(number - wanted), -number

    return min((each for each in known or () if each in EFFORTS), key=distance, default=effort)
