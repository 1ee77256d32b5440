"""Arguments of calls that are sent while the model writes them: a stream has the calls of the whole answer."""

import json
import random

import pytest
from test_protocol import BARE, FENCED, KIMI, QWEN, deepseek

from specjax.server.object_text import ObjectText
from specjax.server.streams import event
from specjax.server.tool_texts import dump, load
from specjax.server.tools import CallFinder, SentCalls, Tools, find_calls

TOOLS = Tools([], ("weather", "time"))
ARGUMENTS = '{"city":"R\\u00f6m \\"\\ud83d\\ude00</tool_call>","n": [1.50,-2e3,null , {}],"deep":{"a":"\\\\"}}'
OBJECT = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
LLAMA = '{"name":"time","parameters":{}}'
ANSWERS = [
    f"<tool_call>\n{OBJECT}\n</tool_call>",
    f"So.\n<tool_call>{OBJECT}</tool_call>\n<tool_call>\n{LLAMA}\n</tool_call>\n",
    f"<tool_call>{LLAMA}</tool_call> and <tool_call>{LLAMA}</tool_call> so",
    f"A <tool_calls>\n[{OBJECT}, {LLAMA}]\n</tool_calls>",
    f"<tool_calls>[{OBJECT}]</tool_calls><tool_calls>[{LLAMA}]</tool_calls>",
    OBJECT,
    f" [{LLAMA},{OBJECT}]",
    f"<|python_tag|>{LLAMA}",
    f"Now [TOOL_CALLS] [{OBJECT}, {LLAMA}]",
    f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
    f"weather {ARGUMENTS}\ntime{{}}",
    KIMI,
    deepseek(FENCED, FENCED),
    deepseek(BARE, BARE),
]
OTHERS = [  # whose calls are known when the answer has ended
    f"<tool_call>{QWEN}</tool_call>",
    '{"arguments": {}, "name": "time"}',
    '<tool_call>{"id": 1, "name": "time", "arguments": {}}</tool_call>',
    '{"name": "time", "arguments": "x"}',
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    "weather is fine",
    "",
]


def stream(text, tools, size):
    """The text and calls of an answer that comes in pieces, and how many parts of calls came before its end."""
    finder, given, calls = CallFinder(tools), "", []
    sent, parts = SentCalls(), []
    for start in range(0, len(text), size):
        given += finder.feed(text[start : start + size])
        parts += finder.take()
    num_early = len(parts)
    begun = [sent.add(part) for part in parts]
    rest, made = finder.finish()
    last = sent.rest(made)
    for part, is_first in zip([*parts, *last], [*begun, *map(sent.add, last)], strict=True):
        if is_first:
            calls.append((part.name, ""))
        calls[part.number] = part.name, calls[part.number][1] + part.arguments
    assert calls == made
    return given + rest, calls, num_early


@pytest.mark.parametrize("text", [*ANSWERS, *OTHERS])
def test_calls_are_those_of_the_whole_answer(text):
    for tools in (TOOLS, TOOLS._replace(is_single=True), TOOLS._replace(is_required=True)):
        rest, calls = find_calls(text, tools)
        for size in (1, 2, 3, 5, 11, len(text) + 1):
            found, made, num_early = stream(text, tools, size)
            assert made == calls and (" ".join(found.split()) == " ".join(rest.split()) if calls else found == text)
            if not tools.is_required:
                assert num_early == 0 if text in OTHERS else num_early > 0
    assert len(find_calls(text, TOOLS)[1]) > 0 or text in OTHERS


def test_arguments_come_as_they_are_written():
    finder, found = CallFinder(TOOLS), []
    for piece in (
        '<tool_call>{"name": "weather", "arg',
        'uments": ',
        '{"city": "Ro',
        "me\\u00",
        'e9", "n": 1',
        "2}",
        "}</tool",
    ):
        assert finder.feed(piece) == ""
        found.append("".join(part.arguments for part in finder.take()))
    assert found == ["", "", '{"city": "Ro', "me", '\u00e9", "n": ', "12}", ""]


def test_a_forced_call():
    """Its arguments are the whole text, as it is."""
    text, tools = '{"city":"Rome" }', Tools([], ("weather",), "weather")
    for size in (1, 4, 99):
        assert stream(text, tools, size) == ("", [("weather", text)], -(-len(text) // size))
        cut, calls, _ = stream(text[:-3], tools, size)
        assert (cut, calls) == ("", [("weather", text[:-3])])
    assert stream("", tools, 1) == ("", [], 0)


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"{OBJECT[:-1]}, 'x'", ", 'x'", 1),
        (f"<tool_call>{LLAMA}</tool_call><tool_call>{OBJECT[:-3]}", "", 2),
        (f"<tool_call>{LLAMA}</tool_call><tool_call>no</tool_call>", "<tool_call>no</tool_call>", 1),
        (f"{LLAMA} That is it.", "That is it.", 1),
        ('time{"a": 1, }', "}", 1),
        ('{"name": "time", "arguments": {"a": 1}, "arguments": {}}', ', "arguments": {}}', 1),
    ],
)
def test_calls_that_the_whole_answer_has_not(text, rest, calls):
    """They have begun. The rest is text."""
    for size in (1, 6, len(text)):
        found, made, _ = stream(text, TOOLS, size)
        assert (found, len(made)) == (rest, calls)


def test_a_name_twice():
    """It stays; the object is the same."""
    text = '<tool_call>{"name": "time", "arguments": {"a": 1, "a": 2}}</tool_call>'
    assert stream(text, TOOLS, 3)[:2] == ("", [("time", '{"a": 1, "a": 2}')])
    assert find_calls(text, TOOLS)[1] == [("time", '{"a": 2}')]


def test_texts_that_no_client_could_read():
    """Half of a pair of surrogates stays an escape, and a number that is no float makes no call."""
    call = '<tool_call>{"name": "time", "arguments": {"a": %s}}</tool_call>'
    text = call % '"\\ud83d\\u00e9"'
    assert find_calls(text, TOOLS)[1] == stream(text, TOOLS, 1)[1] == [("time", '{"a": "\\ud83d\u00e9"}')]
    assert find_calls(call % "1e999", TOOLS) == (call % "1e999", []) and load("[-1e999]") is None
    assert event({"a": "\ud83d"}) == b'data: {"a":"\\ud83d"}\n\n'


def written(text, size):
    """The object that reads a text in pieces, and the text that it writes."""
    made = ObjectText()
    return made, "".join(made.feed(text[start : start + size]) for start in range(0, len(text), size))


VALUES = [
    1,
    -2.5,
    1e300,
    0,
    None,
    True,
    False,
    "",
    "\ud83d",
    "\U0001f600",
    "\ud83d\ud83d",
    "\udc00",
    'a\\"b\n\t\x01',
    "\u00e9/",
]


def a_value(random, depth):
    kind = random.random() if depth else 1
    if kind < 0.25:
        return {
            random.choice(["a", 'b"', "\u00e9\\", ""]): a_value(random, depth - 1) for _ in range(random.randrange(4))
        }
    if kind < 0.45:
        return [a_value(random, depth - 1) for _ in range(random.randrange(4))]
    return random.choice(VALUES)


def test_objects_are_written_as_json_writes_them():
    rng = random.Random(0)
    for _ in range(300):
        value = {str(i): a_value(rng, 3) for i in range(rng.randrange(4))}
        separators = rng.choice([None, (",", ":"), (" , ", " :\n")])
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]), separators=separators)
        expected = dump(json.loads(text))
        for size in (1, 3, 10000):
            made, found = written(text + "} x", size)
            assert made.is_whole and found == expected and made.rest == "} x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1]", ""),
        ('{"a" 1}', '{"a"'),
        ('{"a": NaN}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": 1 2}', '{"a": 1'),
        ('{"a": [1,]}', '{"a": [1, '),
        ('{"a": 1]', '{"a": 1'),
        ("{1: 2}", "{"),
        ('{"a": "\n"}', '{"a": "'),
        ('{"a": "\\x"}', '{"a": "'),
        ('{"a": "\\u12g4"}', '{"a": "'),
        ('{"a": "b\\ud83d\\x"}', '{"a": "b\\ud83d'),
        ('{"a": 1e999}', '{"a": '),
    ],
)
def test_what_is_no_object(text, expected):
    """Nothing that follows the fault is written."""
    for size in (1, 2, 100):
        made, found = written(text, size)
        assert found == expected and made.is_wrong and not made.is_whole and text.endswith(made.rest)
