"""The command `specjax chat`, on a small checkpoint inside this process: typed lines, files of lines, interruptions."""

import io
import signal
import sys
import time

import pytest
from test_llm import SENTENCE, chain_tensors, make_tokenizer, random_tensors, write_checkpoint

from specjax import LLM, SamplingParams
from specjax.cli import main
from specjax.cli.chat import Conversation
from specjax.engine.slots import Slots
from specjax.models import smollm2

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content + '|' }}{% endfor %}{% if add_generation_prompt %}東{% endif %}"
)
ANSWER = SENTENCE[3:]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    ids = [*make_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1]
    directory = tmp_path_factory.mktemp("chat") / "model"
    write_checkpoint(directory, chain_tensors(ids), num_layers=1, hidden=128, max_position_embeddings=512)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


@pytest.fixture
def chat(model, capsys, monkeypatch):
    """Run `specjax chat` on lines, typed at a terminal or not: exit code, standard output, standard error."""

    def run(*lines, typed=False, arguments=()):
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: typed
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: typed)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLORTERM", "")
        given = arguments or ("--draft", model)
        exit_code = main(["chat", "-q", "--model", model, "--num-draft-tokens", "3", "--max-length", "256", *given])
        return exit_code, *capsys.readouterr()

    return run


def test_a_later_question_computes_new_tokens_alone(tmp_path, monkeypatch):
    """The answers are those that the whole conversation gives as one prompt to decoding without drafts."""
    directory = write_checkpoint(tmp_path / "model", random_tensors(0), max_position_embeddings=512)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    llm, chunk = LLM(directory, directory, num_draft_tokens=3), 32
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    fed, prefill = [], Slots.prefill

    def counting(self, slots, chunks, *args, **options):
        fed.extend(int(each.inputs.num_tokens[0]) for each in chunks)
        return prefill(self, slots, chunks, *args, **options)

    monkeypatch.setattr(Slots, "prefill", counting)
    conversation = Conversation(llm, greedy, "Answer briefly, in letters of your own.")
    with conversation.engine as engine:
        for question in ("the cat sat on the mat, and then", "why", "and the dog"):
            history = conversation._encode([*conversation.turns, {"role": "user", "content": question}])
            known = len(conversation._encode(conversation.turns)) if conversation.turns else 0
            while engine.stats().num_running + engine.stats().num_waiting:
                time.sleep(0.01)  # the answer before is being computed as a part of the prompt
            fed.clear()
            result = conversation.answer(question, lambda piece: None)
            assert result.num_cached_tokens >= known - known % chunk - chunk * (known % chunk < 4)
            num_fed = 0
            while num_fed < len(history) - result.num_cached_tokens:  # the call that computes ahead may follow
                num_fed += fed.pop(0)
            assert num_fed == len(history) - result.num_cached_tokens
    (alone,) = llm.plain().generate([history], greedy)
    assert alone.token_ids == result.token_ids
    assert result.num_cached_tokens >= 3 * chunk


def test_questions_from_a_file(chat):
    exit_code, out, err = chat("hello", "", " /is this a question?", "/stats", "/quit", "not read")
    first, second, drafts, last, prompt, total = out.splitlines()
    assert (exit_code, first, second, err) == (0, ANSWER, ANSWER, "")
    assert drafts == "3 drafts a step by DraftModel, verified by rejection; temperature 0"
    assert "acceptance rate 1.00, mean acceptance length 4.00" in last
    assert "s to the first token" in prompt and total.startswith("all answers: 2, ") and total.endswith("rate 1.00")


def test_commands(chat, model):
    exit_code, out, err = chat(
        "/temperature 0.01",
        "/draft none",
        "/draft ngram",
        "/system be brief",
        "hello",
        "/clear",
        "/system",
        "/help",
        arguments=["--seed", "1", "--num-draft-tokens", "0"],
    )
    lines = out.splitlines()
    assert (exit_code, err) == (0, "")
    assert lines[:4] == [
        "temperature 0.01; the next answer may compile first",
        "plain decoding",
        "ngram drafts",
        "the next answer reads this system message",
    ]
    assert lines[4:7] == [ANSWER, "a new conversation", "the next answer reads the system message of the chat template"]
    assert [line.split(":")[0].split()[0] for line in lines[7:-1]] == [
        "/stats",
        "/draft",
        "/temperature",
        "/system",
        "/clear",
        "/help",
        "/quit",
    ]


def test_errors_leave_the_conversation(chat, tmp_path):
    lines = "/stat", "/temperature hot", "/temperature -1", "/draft", f"/draft {tmp_path}", "x" * 300, "hello"
    exit_code, out, err = chat(*lines)
    assert (exit_code, out) == (2, ANSWER + "\n")
    expected = (
        ", /clear, /help, /quit, got /stat; did you mean 'stats'?",
        "/temperature needs a number, got 'hot'",
        "temperature must be",
        "/draft needs a name, as --draft takes it, or none",
        "is empty",
        "; /clear begins a new conversation",
    )
    assert len(err.splitlines()) == len(expected)
    for line, part in zip(err.splitlines(), expected, strict=True):
        assert line.startswith("specjax: error: ") and part in line


@pytest.mark.parametrize("without_colours", [False, True])
def test_a_terminal_has_colours(chat, monkeypatch, without_colours):
    monkeypatch.setenv("NO_COLOR", "1" if without_colours else "")
    exit_code, out, _ = chat("hello", "/foo", "/stats", typed=True)
    assert exit_code == 0  # an error of a typed line is none of the command
    assert out.startswith("> ") and out.endswith("> \n")
    coloured = "\x1b[32m京\x1b[0m"  # an accepted draft
    assert (coloured in out, "\x1b[3" in out) == (not without_colours, not without_colours)
    assert ANSWER in out or not without_colours


def test_an_interruption_keeps_the_conversation(chat, monkeypatch):
    """The first answer stops where Ctrl-C comes, and the second follows it; at an empty line nothing happens."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    answer, num_turns = Conversation.answer, []

    def interrupted(self, question, show):
        num_turns.append(len(self.turns))

        def show_or_interrupt(piece):
            if question == "first" and "é" in piece.text:
                raise KeyboardInterrupt
            show(piece)

        return answer(self, question, show_or_interrupt)

    monkeypatch.setattr(Conversation, "answer", interrupted)
    monkeypatch.setenv("NO_COLOR", "1")
    try:
        exit_code, out, _ = chat("first", "second", typed=True)
        assert (exit_code, out) == (0, f"> 京\n> {ANSWER}\n> \n") and num_turns == [0, 2]
        assert chat("first", "second")[:2] == (130, "京\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_arguments_that_a_chat_cannot_show(chat):
    for arguments, message in (
        (["--n", "2", "--temperature", "1"], "--n must be 1"),
        (["--logprobs", "1"], "--logprobs must not be given"),
    ):
        exit_code, out, err = chat("hello", arguments=arguments)
        assert (exit_code, out) == (2, "") and err.startswith(f"specjax: error: {message}")


def test_without_a_model(monkeypatch, capsys, tmp_path):
    """SmolLM2 answers where its package is installed; else the embedded family does, and a sentence says so."""
    loaded = []

    def load(args):
        loaded.append(args.model)
        raise ValueError("no more is needed")

    monkeypatch.setattr("specjax.cli.chat.load", load)
    for path in (None, tmp_path):
        monkeypatch.setattr(smollm2, "find_target", lambda path=path: path)
        assert main(["chat"]) == 2
    assert loaded == [None, "smollm2-135m"]
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("specjax: no --model is given, so the embedded family answers, ")
    assert first.endswith(smollm2.install_command()) and len(others) == 2
