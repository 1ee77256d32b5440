"""Chat templates: what they are given, where they are found, and how they fail."""

import json
import re
import sys
from types import MappingProxyType

import numpy as np
import pytest
from test_tokenizer import make_tokenizer

from specjax import models
from specjax.engine import chat
from specjax.engine.chat import render
from specjax.models.directory import Checkpoint
from specjax.processes import worker
from specjax.validation.extras import install_command

MESSAGES = [
    {"role": "system", "content": 'Say "é" & no more'},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "é"},
    {"role": "user", "content": "Again"},
]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token + '\\n' }}
{%- endfor %}
{%- set name = 'kept' %}
{%- generation %}{% set name = 'inner' %}{{ name }}{% endgeneration %}
{%- set kept = namespace(last=messages[-1] | tojson) %}
{{- name + kept.last }}
{{- messages[2] | tojson(ensure_ascii=True) + messages[2] | tojson(separators=(',', ':'), sort_keys=True) }}
{%- if add_generation_prompt %}{{- '\\n<|assistant|>' }}{% endif %}"""
EXPECTED = """<s><|system|>Say "é" & no more</s>
<|user|>Hello</s>
<|assistant|>é</s>
<|user|>Again</s>
innerkept{"role": "user", "content": "Again"}\
{"role": "assistant", "content": "\\u00e9"}{"content":"é","role":"assistant"}
<|assistant|>"""
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.fixture
def jinja2():
    return pytest.importorskip("jinja2")


def write_config(directory, **fields):
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("place", ["file", "string", "list", "of images"])
def test_render(place, tmp_path, jinja2):
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        write_config(tmp_path, **TOKENS)
    elif place == "of images":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        write_config(tmp_path, **TOKENS)
    elif place == "string":
        write_config(tmp_path, chat_template=TEMPLATE, **TOKENS)
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        write_config(tmp_path, chat_template=named, **TOKENS)
    assert render(Checkpoint(tmp_path), MESSAGES) == EXPECTED


@pytest.mark.parametrize(
    ("early", "tokens"),
    [("<s>", {"bos_token": "<unk>"}), ("<unk>", {"bos_token": "<s>", "added_tokens_decoder": {}})],
    ids=["early", "late"],
)
def test_render_is_that_of_transformers(early, tokens, tmp_path, jinja2):
    """The file of special tokens alone is for early checkpoints."""
    transformers = pytest.importorskip("transformers")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": early}))
    write_config(tmp_path, chat_template=TEMPLATE, eos_token="</s>", **tokens)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert render(Checkpoint(tmp_path), MESSAGES) == expected == EXPECTED


NAMED = {"image_token": "<unk>", "add_bos_token": True, "extra_special_tokens": {"audio": "</s>"}}
SHOWN = "{{ image_token }} {{ audio }} {{ add_bos_token }} {{ messages[0].content }}"


def test_special_tokens_of_other_names_are_those_of_transformers(tmp_path, jinja2):
    transformers = pytest.importorskip("transformers")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, chat_template=SHOWN, **NAMED)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(MESSAGES[1:2], tokenize=False)
    assert render(Checkpoint(tmp_path), MESSAGES[1:2]) == expected == "<unk> </s>  Hello"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_further_special_tokens(file, tmp_path, jinja2):
    """A list, as early checkpoints have it."""
    write_config(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ additional_special_tokens | join(',') }} {{ image_token }}")
    fields = {"additional_special_tokens": ["<a>", {"content": "<b>"}], "image_token": {"content": "<i>"}}
    (tmp_path / file).write_text(json.dumps(fields))
    assert render(Checkpoint(tmp_path), MESSAGES) == "<a>,<b> <i>"
    (tmp_path / file).write_text(json.dumps({"additional_special_tokens": "<a>"}))
    with pytest.raises(ValueError, match=f"additional_special_tokens in .*{file} must be"):
        render(Checkpoint(tmp_path), MESSAGES)


def test_keys_without_a_value_are_not_there(tmp_path, jinja2):
    """As clients of OpenAI's protocol send them; arguments, which are data, keep theirs."""
    calls = "{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}"
    template = "{% for m in messages %}{{ m.keys() | list }}" + calls + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    made = {"id": None, "type": "function", "function": {"name": "f", "description": None, "arguments": {"a": None}}}
    messages = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "assistant", "content": "y", "tool_calls": None},
    ]
    kept = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    expected = f"['role', 'content']['role', 'tool_calls']{json.dumps(kept)}['role', 'content']"
    assert render(Checkpoint(tmp_path), messages) == expected
    assert messages[1]["content"] is None and made["id"] is None  # the caller's are as they were


@pytest.mark.parametrize("place", ["list", "folder", "one"])
def test_conversations_with_tools_have_their_own_template(place, tmp_path, jinja2):
    """As Hermes 3 has it; transformers 5 writes such a list as files."""
    transformers = pytest.importorskip("transformers")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    plain, with_tools = "{{ messages[0].content }}", "{{ tools[0].function.name }}: {{ messages[0].content }}"
    if place == "list":
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
        write_config(tmp_path, chat_template=named)
    else:
        write_config(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(plain)
    if place == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for given, expected in ((None, "Hello"), ([], "Hello"), (tools, "Hello" if place == "one" else "add: Hello")):
        found = render(Checkpoint(tmp_path), MESSAGES[1:2], given)
        assert found == expected == tokenizer.apply_chat_template(MESSAGES[1:2], tools=given or None, tokenize=False)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (TEMPLATE, "refuses the messages: unknown role tool"),
        ("{% for %}", "refuses the messages: "),
        ("{{ messages.clear() }}", "refuses the messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{{ 1 / 0 }}", "refuses the messages: division by zero"),
        (None, "must have chat_template.jinja, or chat_template in tokenizer_config.json"),
        (7, "must have chat_template.jinja"),
        ([{"name": "rag", "template": "x"}], "must have chat_template.jinja"),
    ],
)
def test_bad_template(template, match, tmp_path, jinja2):
    write_config(tmp_path, chat_template=template, **TOKENS)
    with pytest.raises(ValueError, match=match):
        render(Checkpoint(tmp_path), [{"role": "tool", "content": "x"}])


HELD = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "must end within 1 seconds"),
        ("{{ 7 ** (7 ** 77) }}", "must end within 1 seconds"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "it writes more than 8388608 characters"),
        ("{{ 'x' * 10 ** 12 }}", "it needs too much memory"),
        (HELD, "it needs too much memory"),
    ],
    ids=["a loop", "a number", "a long text", "a longer text", "a text that is kept"],
)
def test_a_template_without_end(template, match, tmp_path, jinja2, monkeypatch):
    """The next one is rendered."""
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 1.0 if "within" in match else 60.0)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=match):
        render(Checkpoint(tmp_path), MESSAGES)
    monkeypatch.undo()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    write_config(tmp_path, **TOKENS)
    assert render(Checkpoint(tmp_path), MESSAGES) == EXPECTED


def test_an_interruption(tmp_path, jinja2, monkeypatch):
    """The answer that it does not wait for is not taken for the next question's."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")

    def interrupt(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "read_frame", interrupt)
    with pytest.raises(KeyboardInterrupt):
        render(Checkpoint(tmp_path), [{"role": "user", "content": "first"}])
    monkeypatch.undo()
    assert render(Checkpoint(tmp_path), [{"role": "user", "content": "second"}]) == "second"


def test_values_that_json_does_not_have(tmp_path, jinja2):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ messages[0].parts[1] }}")
    message = MappingProxyType({"role": "user", "content": "\ud800", "parts": (1, 2)})
    assert render(Checkpoint(tmp_path), [message]) == "\ud8002"
    with pytest.raises(ValueError, match="messages and tools must have values that JSON can write: got object"):
        render(Checkpoint(tmp_path), [{"role": "user", "content": object()}])


@pytest.mark.parametrize("messages", [[], 5, np.ones(2), ["hello"], [{"content": "hello"}]])
def test_bad_messages(messages, tmp_path):
    with pytest.raises(ValueError, match='messages must be mappings with "role" and "content"'):
        render(Checkpoint(tmp_path), messages)


def test_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("chat", "jinja2"))) as error:
        render(Checkpoint(tmp_path), MESSAGES)
    assert error.value.name == "jinja2"


def test_the_embedded_target_goes_on_with_a_conversation(jinja2):
    messages = [
        {"role": "system", "content": "# Python"},
        {"role": "user", "content": "x = f(1)"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "def g(x):\n"},
    ]
    expected = '# {"name": "f"}\n# Python\nx = f(1)\n# {"name": "f", "arguments": {"a": 1}}\n\n2\ndef g(x):\n'
    assert render(Checkpoint(models.EMBEDDED / "target"), messages, [{"name": "f"}]) == expected
    assert render(Checkpoint(models.EMBEDDED / "target"), messages[-1:]) == "def g(x):\n"
