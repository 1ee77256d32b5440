"""Reasoning, text and calls of tools in answers of Qwen and gpt-oss, whole, streamed, and in each protocol."""

import json
import re

import pytest
from test_protocol import figures
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from specjax.engine.requests import Completion, Piece, Result
from specjax.models.directory import Checkpoint
from specjax.models.tokenizer import harmony_ends
from specjax.server import answers, protocol
from specjax.server.anthropic import MessageAnswer, parse_message
from specjax.server.harmony import Harmony
from specjax.server.parts import Plain, Thinking
from specjax.server.responses import ResponseAnswer, parse_response
from specjax.server.served import Served
from specjax.server.tools import Tools

TOOLS = Tools([], ("weather", "time"))
SUN = '{"city": "Rome"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {SUN}}}</tool_call>'
HARMONY = "<|channel|>analysis<|message|>hm < 3<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
HARMONY_CALL = f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{SUN}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It's <|\n2.<|return|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"


def parts_of(make, text, size):
    """The parts of an answer that comes in pieces of some characters: reasoning, text and calls.

    The calls are as the end has them; parts that came before belong to them.
    """
    parts, found, calls = make(), ["", ""], []
    for start in range(0, len(text), size):
        part = parts.feed(text[start : start + size])
        found = [found[0] + part.reasoning, found[1] + part.text]
        for one in part.calls:
            if one.number == len(calls):
                calls.append([one.name, ""])
            calls[one.number][1] += one.arguments
    last = parts.finish()
    for (name, arguments), made in zip(calls, last.calls, strict=False):
        assert name == made.name and made.arguments.startswith(arguments)
    assert len(calls) <= len(last.calls)
    return found[0] + last.reasoning, found[1] + last.text, [(one.name, one.arguments) for one in last.calls]


MADE = [("weather", SUN)]
ANSWERS = [
    (Plain, "<think>a</think>b", ("", "<think>a</think>b", [])),
    (Thinking, "<think>\na <b>\n\nc\n</think>\n\nd </think>", ("a <b>\n\nc", "d </think>", [])),
    (Thinking, " <think></think>d", ("", "d", [])),
    (Thinking, "<thin", ("", "<thin", [])),
    (Thinking, " x<think>", ("", " x<think>", [])),
    (Thinking, "<think>a </thi", ("a </thi", "", [])),
    (Thinking, "", ("", "", [])),
    (Thinking, f"<think>{CALL}</think>{CALL}", (CALL, "", MADE)),
    (lambda tools: Thinking(tools, is_open=True), "a\n</think>\nb", ("a", "b", [])),
    (lambda tools: Thinking(tools, is_open=True), "a\n", ("a", "", [])),
    (Harmony, HARMONY + FINAL, ("hm < 3\nso", "It's <|\n2.", [])),
    (Harmony, HARMONY + PREAMBLE + HARMONY_CALL, ("hm < 3\nso", "I look.", MADE)),
    (Harmony, HARMONY_CALL.removeprefix("<|start|>assistant"), ("", "", MADE)),
    (Harmony, " to=functions.weather<|channel|>commentary<|message|>" + SUN + "<|call|>", ("", "", MADE)),
    (Harmony, HARMONY_CALL.replace("weather", "others"), ("", SUN, [])),
    (Harmony, "<|channel|>analysis<|message|>hm <|e", ("hm <|e", "", [])),
    (Harmony, "<|channel|>ana", ("", "", [])),
    (Harmony, "plain < text", ("", "plain < text", [])),
    (Harmony, "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", ("a", "b", [])),
]


@pytest.mark.parametrize(("make", "text", "expected"), ANSWERS)
def test_parts(make, text, expected):
    """The same in pieces of any size, and whole."""
    for size in (1, 2, 3, 7, 1000):
        assert parts_of(lambda: make(TOOLS), text, size) == expected
    whole = make(TOOLS).whole(text)
    assert (whole.reasoning, whole.text, [tuple(one) for one in whole.calls]) == expected


CITY = '{"city": '
BROKEN = [  # a text, its parts whole and in a stream, and whether the last call of the stream is cut
    (Harmony, HARMONY_CALL.removesuffix("}<|call|>"), ("", SUN[:-1], []), ("", "", [("weather", SUN[:-1])]), True),
    (
        Harmony,
        HARMONY_CALL.replace('"Rome"', "NaN"),
        ("", '{"city": NaN}', []),
        ("", "NaN}", [("weather", CITY)]),
        True,
    ),
    (Harmony, HARMONY_CALL.replace("}<", "} so<"), ("", SUN + " so", []), ("", "so", MADE), False),
    (Harmony, HARMONY_CALL.replace(SUN, "[1]"), ("", "[1]", []), ("", "[1]", []), False),
    (Plain, CALL[: CALL.index('"}}')], ("", CALL[: CALL.index('"}}')], []), ("", "", [("weather", SUN[:-2])]), True),
    (Plain, CALL.removesuffix("}</tool_call>"), ("", CALL.removesuffix("}</tool_call>"), []), ("", "", MADE), False),
]


@pytest.mark.parametrize(("make", "text", "whole", "streamed", "is_cut"), BROKEN)
def test_calls_that_are_none(make, text, whole, streamed, is_cut):
    """A whole answer has them as text. A stream has sent their parts before it could know."""
    assert make(TOOLS).whole(text) == (*whole, False)
    for size in (1, 2, 7, 1000):
        assert parts_of(lambda: make(TOOLS), text, size) == streamed
    parts = make(TOOLS)
    parts.feed(text)
    assert parts.finish().is_cut == is_cut


def test_a_tool_by_the_name_of_a_part():
    tools = Tools([], ("text", "reasoning"))
    found = Harmony(tools).whole(HARMONY_CALL.replace("weather", "text"))
    assert found.calls == [("text", SUN)] and found.text == ""


def test_a_single_call():
    one, two = (make(TOOLS._replace(is_single=is_single)) for make, is_single in ((Harmony, True), (Harmony, False)))
    assert len(one.whole(2 * HARMONY_CALL).calls) == 1 and len(two.whole(2 * HARMONY_CALL).calls) == 2


WORDS = ["a", "b", "user", "assistant", "analysis", "final", "<|end|>"]
OF_HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


def served_with(directory, special=(), added=(), ending=""):
    """A model whose tokenizer has these tokens, and whose template ends with a text."""
    words = {word: i for i, word in enumerate([*WORDS[:-1], "<unk>", *special, *added])}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in added])
    directory.mkdir()
    template = "{% for m in messages %}{{ m.thinking or '' }}{{ m.content }}{% endfor %}" + ending
    (directory / "chat_template.jinja").write_text(template)
    return Served("small", tokenizer, len(words), 64, (), directory)


def chat(served, *before, **fields):
    return protocol.parse_chat({"messages": [*before, {"role": "user", "content": "a"}], **fields}, served)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    return served_with(tmp_path_factory.mktemp("harmony") / "x", OF_HARMONY)


def test_the_form_of_answers(harmony, tmp_path):
    plain = served_with(tmp_path / "plain")
    thinks = served_with(tmp_path / "thinks", added=("<think>", "</think>"))
    begun = served_with(tmp_path / "begun", added=("<think>", "</think>"), ending="<think>")
    assert chat(plain).parts is Plain
    call = chat(harmony, skip_special_tokens=True)
    assert call.parts is Harmony and not call.params.skip_special_tokens
    assert chat(thinks).parts(None).whole("<think>a</think>b")[:2] == ("a", "b")
    assert chat(begun).parts(None).whole("a</think>b")[:2] == ("a", "b")
    for served in (begun, harmony):  # the grammar is of the text
        assert chat(served, response_format={"type": "json_object"}).parts is Plain


SECTION = f"<|tool_call_begin|>weather:0<|tool_call_argument_begin|>{SUN}<|tool_call_end|>"
SECTION = f"<|tool_calls_section_begin|>{SECTION}<|tool_calls_section_end|>"


@pytest.mark.parametrize("made", [CALL, SECTION, f"[TOOL_CALLS]weather[ARGS]{SUN}"])
def test_tags_that_are_special_tokens(tmp_path, made):
    """They part the answer, and other special tokens are left out, as they are where none is a tag."""
    token = r"(</?\w+>|<\|\w+\|>|\[\w+\])"
    text = f"<think>so<|end|></think>I look. {made}<|end|>"
    special, tools = dict.fromkeys(re.findall(token, text)), [{"type": "function", "function": FUNCTION}]
    served = served_with(tmp_path / "special", special)
    call = chat(served, tools=tools)
    assert not (call.params.skip_special_tokens or call.params.spaces_between_special_tokens)
    whole, parts = call.parts(call.tools).whole(text), call.parts(call.tools)
    assert (whole.reasoning, whole.text, [tuple(one) for one in whole.calls]) == ("so", "I look.", MADE)
    fed, last = [parts.feed(piece) for piece in re.split(token, text)], parts.finish()
    assert "".join(part.reasoning for part in fed) + last.reasoning == "so"
    assert "".join(part.text for part in fed) + last.text == "I look. "
    assert [tuple(one) for one in last.calls] == MADE
    assert chat(served).parts(None).whole(text)[:2] == ("so", "I look. " + re.sub(token, "", made))
    plain = served_with(tmp_path / "plain", ["<|end|>"], special.keys() - {"<|end|>"})
    assert chat(plain, tools=tools).params.skip_special_tokens


@pytest.mark.parametrize("is_numbered", [True, False])
def test_ids_of_calls(tmp_path, is_numbered):
    """The template of Kimi K2 writes the id of a call in place of the name of its tool."""
    served = served_with(tmp_path / "x", ["<|tool_call_argument_begin|>"] if is_numbered else ["<|tool_call_begin|>"])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    other = {**call, "id": "2", "function": {"name": "time"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call, other]},
        *({"role": "tool", "tool_call_id": name, "content": "b"} for name in ("2", "1", "3")),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "encode_chat", lambda served, messages, *_, **__: texts.append(ids_of(messages)) or [0])
        chat(served, *messages)
    numbered = ["functions.weather:0", "functions.time:1", "functions.time:1", "functions.weather:0", "3"]
    numbered += ["functions.weather:2", "functions.weather:2"]
    assert texts == [numbered if is_numbered else ["1", "2", "2", "1", "3", "1", "1"]]


def ids_of(messages):
    """The ids of calls and results, in their order."""
    found = []
    for message in messages:
        found += [call["id"] for call in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


def test_a_grammar_is_of_the_final_message(harmony):
    call = chat(harmony, response_format={"type": "json_object"})
    end = harmony.tokenizer.decode(call.prompts[0][-3:], skip_special_tokens=False)
    assert end.split() == ["<|channel|>", "final", "<|message|>"] and call.params.skip_special_tokens


def test_a_grammar_is_of_the_text_after_reasoning(tmp_path):
    for ending, expected in (("<think>", ["<think>", "</think>"]), ("", [])):
        served = served_with(tmp_path / f"x{ending[1:-1]}", added=("<think>", "</think>"), ending=ending)
        for fields, more in (({}, 0), ({"response_format": {"type": "json_object"}}, 1)):
            text = served.tokenizer.decode(chat(served, **fields).prompts[0], skip_special_tokens=False)
            assert [word for word in text.split() if "think" in word] == expected[: 1 + more]


def test_reasoning_of_former_answers(harmony):
    """The template of gpt-oss takes no text beside reasoning and calls."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for more, expected in (({"content": ""}, "ba"), ({"content": "b"}, "bba"), ({"content": "a"}, "aa")):
        calls = {"tool_calls": [call]} if more["content"] == "a" else {}
        message = {"role": "assistant", "reasoning": "b", **more, **calls}
        (ids,) = chat(harmony, message).prompts
        assert harmony.tokenizer.decode(ids).replace(" ", "") in (expected, "<unk>")


def test_two_tokens_end_a_turn(harmony, tmp_path):
    ends = [harmony.tokenizer.token_to_id(one) for one in ("<|return|>", "<|call|>")]
    assert harmony_ends(harmony.tokenizer) == ends
    harmony.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends[0]}))
    assert Checkpoint(tmp_path).eos_token_ids(harmony.vocab_size) == tuple(ends)


def result_of(text):
    completion = Completion(text, [0], None, "stop", None, 0)
    return Result([0], [completion], figures(1))


def pieces_of(text):
    return [Piece(text[i : i + 3], 0, "target", 0, None) for i in range(0, len(text), 3)]


FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TEXT = HARMONY + PREAMBLE + HARMONY_CALL


def test_chat_completions(harmony):
    call = chat(harmony, tools=[{"type": "function", "function": FUNCTION}])
    head = answers.new_head(call)
    (choice,) = answers.answer(call, [result_of(TEXT)], head, harmony)["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm < 3\nso" and message["content"] == "I look."
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": SUN}
    assert choice["finish_reason"] == "tool_calls"

    stream = answers.ChoiceStream(call, 0, 0, head, harmony)
    chunks = [stream.start(), *(stream.feed([piece]) for piece in pieces_of(TEXT)), *stream.finish(result_of(TEXT))]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk is not None]
    for name, expected in (("reasoning", "hm < 3\nso"), ("reasoning_content", "hm < 3\nso"), ("content", "I look.")):
        assert "".join(delta.get(name, "") for delta in deltas) == expected
    made = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    assert "".join(made) == SUN and len(made) > 3
    assert not any(delta.get("reasoning") and "content" in delta for delta in deltas)


def events_of(answer, text):
    start, fed = answer.start(), [answer.feed([(0, piece)]) for piece in pieces_of(text)]
    lines = b"".join([start, *fed, answer.finish([result_of(text)])]).decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_responses(harmony):
    call = parse_response({"input": "a", "tools": [{"type": "function", **FUNCTION}]}, harmony)
    body = ResponseAnswer(call, harmony).body([result_of(TEXT)])
    thought, message, made = body["output"]
    assert thought["type"] == "reasoning" and thought["content"][0]["text"] == "hm < 3\nso"
    assert message["content"][0]["text"] == "I look." and made["arguments"] == SUN
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0

    events = events_of(ResponseAnswer(call, harmony), TEXT)
    deltas = [each["delta"] for each in events if each["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm < 3\nso"
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    opened = [each for each in events if each["type"] == "response.output_item.added"]
    closed = [each for each in events if each["type"] == "response.output_item.done"]
    assert [each["output_index"] for each in opened] == [each["output_index"] for each in closed] == [0, 1, 2]
    assert [each["item"]["id"] for each in opened] == [each["item"]["id"] for each in closed]
    assert events[-1]["response"]["output"][0]["content"] == thought["content"]

    mixed = HARMONY + PREAMBLE + HARMONY + FINAL
    items = events_of(ResponseAnswer(call, harmony), mixed)[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "reasoning", "message"]


def test_messages(harmony):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    call = parse_message(body | {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}, harmony)
    content = MessageAnswer(call, harmony).body([result_of(TEXT)])["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[0]["thinking"] == "hm < 3\nso" and content[1]["text"] == "I look."

    events = events_of(MessageAnswer(call, harmony), TEXT)
    blocks = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm < 3\nso"
    assert [each["index"] for each in events if each["type"] == "content_block_stop"] == [0, 1, 2]
