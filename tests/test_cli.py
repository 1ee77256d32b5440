"""The command, on a checkpoint that greedily says one sentence; mostly inside this process, where it compiles once."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from test_llm import SENTENCE, chain_tensors, make_tokenizer, write_checkpoint

from specjax import LLM, SamplingParams
from specjax.cli import main
from specjax.cli.generate import _compare
from specjax.cli.models import warn_of_other_times
from specjax.engine.slots import Slots
from specjax.theory import StepTimes
from specjax.validation.extras import install_command

pytestmark = pytest.mark.slow  # the command

PROMPT, TEXT = SENTENCE[0], SENTENCE[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    ids = [*make_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1]
    directory = tmp_path_factory.mktemp("cli") / "model"
    return str(write_checkpoint(directory, chain_tensors(ids), num_layers=1, hidden=128))


@pytest.fixture
def generate(model, capsys):
    """Run `specjax generate` with the model as target and draft: exit code, standard output, standard error."""

    def run(*arguments):
        exit_code = main(["generate", "--model", model, "--draft", model, "--num-draft-tokens", "3", *arguments])
        return exit_code, *capsys.readouterr()

    return run


def process(*arguments, text=None):
    command = [sys.executable, "-m", "specjax", *arguments]
    return subprocess.run(command, input=text, capture_output=True, encoding="utf-8", timeout=300)


class TestText:
    def test_piped(self, generate):
        exit_code, out, err = generate(PROMPT)
        assert (exit_code, out) == (0, TEXT + "\n")
        assert "tokens/s" in err
        assert "acceptance rate 1.00, mean acceptance length 4.00" in err

    def test_sampling_options_and_stop(self, generate):
        exit_code, out, _ = generate(PROMPT, "--temperature", "0.01", "--seed", "3", "--stop", "never", "--stop", ", E")
        assert (exit_code, out) == (0, "o東京é🚀\n")

    def test_terminal(self, generate, monkeypatch):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLORTERM", "")
        monkeypatch.delenv("NO_COLOR", raising=False)
        _, out, err = generate(PROMPT)
        assert "\x1b[32mo\x1b[0m" in out  # an accepted draft
        assert "\x1b[36m東\x1b[0m" in out  # a bonus token
        assert "\x1b[32maccepted\x1b[0m \x1b[33mrecovered\x1b[0m \x1b[36mbonus\x1b[0m\n" in out
        assert "acceptance rate" in err

    def test_compare(self, generate):
        _, out, err = generate(PROMPT, "--compare")
        assert out == TEXT + "\n"
        assert "plain decoding: a speed-up of " in err
        assert err.endswith("; the texts agree\n")

    def test_plain_decoding(self, model, capsys):
        assert main(["generate", PROMPT, "--model", model]) == 0
        out, err = capsys.readouterr()
        assert out == TEXT + "\n"
        assert "no drafts" in err

    def test_chat(self, model, tmp_path, capsys):
        pytest.importorskip("jinja2")
        directory = shutil.copytree(model, tmp_path / "model")
        template = "<s>{{ messages[0].role[4:] + messages[0].content }}{% if add_generation_prompt %}東{% endif %}"
        (directory / "chat_template.jinja").write_text(template)
        models = "--model", str(directory), "--draft", str(directory)
        assert main(["generate", "go", *models, "--chat", "--compare", "--max-length", "64"]) == 0
        out, err = capsys.readouterr()
        assert out == TEXT.removeprefix("o東") + "\n"
        assert err.endswith("; the texts agree\n")
        result = LLM(directory).chat([{"role": "user", "content": "go"}], SamplingParams(temperature=0))
        assert result.text == TEXT.removeprefix("o東")

    def test_dtype(self, model, capsys):
        assert main(["generate", PROMPT, "--model", model, "--dtype", "bfloat16"]) == 0
        assert capsys.readouterr().out == TEXT + "\n"

    def test_interrupted(self, generate, monkeypatch):
        interrupt_after(monkeypatch, calls=3)
        exit_code, out, err = generate(PROMPT)
        assert (exit_code, out) == (130, "o東京\n")
        assert "7 tokens in" in err


def test_the_reader_of_the_output_leaves(model):
    """As `head` does: the command ends quietly. Its threads need the signal of broken pipes to stay ignored."""
    ours, theirs = os.pipe()
    os.close(ours)
    arguments = ["generate", PROMPT, "--model", model, "--num-draft-tokens", "0"]
    code = f"import signal, sys, specjax.cli; code = specjax.cli.main({arguments}); assert signal.getsignal("
    code += "signal.SIGPIPE) is signal.SIG_IGN; sys.exit(code)"
    ended = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, timeout=300)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_no_room_for_the_output(model, arguments):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        arguments = [PROMPT, "--model", model, "--num-draft-tokens", "0", *arguments]
        command = [sys.executable, "-m", "specjax", "generate", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 2
    assert ended.stderr == "specjax: error: [Errno 28] No space left on device: 'standard output'\n"


@pytest.fixture
def interruptions():
    """Interruptions are errors, also where whoever started the tests in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptions")
def test_an_interruption_that_python_drops_is_repeated(generate, monkeypatch):
    """As it does where JAX is called while garbage is collected."""

    class Dropping:
        def __del__(self):
            raise KeyboardInterrupt

    step, counter = Slots.step, iter(range(100))

    def step_that_drops(*args, **options):
        if next(counter) == 1:
            Dropping()
        time.sleep(0.2)
        return step(*args, **options)

    monkeypatch.setattr(Slots, "step", step_that_drops)
    exit_code, out, _ = generate(PROMPT)
    assert exit_code == 130 and TEXT.startswith(out.rstrip("\n")) and out != TEXT + "\n"


@pytest.mark.parametrize(
    "closed, exit_code, out, err",
    [("0<&-", 2, "", "must have at least one token"), ("1>&-", 0, "", "tokens/s"), ("2>&-", 2, "", "")],
)
def test_closed_files(model, closed, exit_code, out, err):
    command = ["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-m", "specjax", "generate", "-", "--model", model]
    ended = subprocess.run(command, input="" if closed == "2>&-" else PROMPT, capture_output=True, text=True)
    assert ended.returncode == exit_code and ended.stdout == out
    assert err in ended.stderr and "Traceback" not in ended.stderr


def interrupt_after(monkeypatch, calls):
    """Interrupt decoding as Ctrl-C would: the last of the calls, each of which dispatches a step."""
    step, counter = Slots.step, iter(range(calls))

    def step_or_interrupt(*args, **options):
        if next(counter, None) is None:
            raise KeyboardInterrupt
        return step(*args, **options)

    monkeypatch.setattr(Slots, "step", step_or_interrupt)


def test_times_of_another_model_are_named(tmp_path, caplog):
    path = str(tmp_path / "times.json")
    StepTimes({1: {0: 1.0}}).save(path, model=None, draft="ngram", device=jax.devices()[0].device_kind)
    warn_of_other_times(path, None, "ngram")
    assert not caplog.records
    warn_of_other_times(path, "a/model", "ngram")
    assert "with model the default, and this run has a/model" in caplog.text


@pytest.mark.parametrize("given, expected", [([], None), (["--step-sizes"], []), (["--step-sizes", "1", "4"], [1, 4])])
def test_step_sizes_of_a_server(model, monkeypatch, given, expected):
    found = []
    monkeypatch.setattr("specjax.server.run.serve", lambda *args, step_sizes, **options: found.append(step_sizes) or 0)
    assert main(["serve", "--model", str(model), "--no-compilation-cache", *given]) == 0
    assert found == [expected]


class TestJson:
    def test_figures(self, generate):
        exit_code, out, err = generate(PROMPT, "--json", "--compare")
        report = json.loads(out)
        assert (exit_code, err) == (0, "")
        assert (report["prompt"], report["text"], report["finish_reason"]) == (PROMPT, TEXT, "stop")
        assert report["stop_reason"] is None
        assert report["metrics"]["num_tokens"] == len(report["token_ids"]) == 20
        assert report["metrics"]["acceptance_rate_per_position"] == [1, 1, 1]
        assert report["metrics"]["tokens_per_second"] > 0
        compare = report["compare"]
        assert compare["texts_agree"] is True
        assert compare["speed_up"] == compare["tokens_per_second"] / compare["plain_tokens_per_second"] > 0

    def test_speed_up_is_over_plain_decoding(self):
        def llm(speed, plain=None):
            result = SimpleNamespace(text="", metrics=SimpleNamespace(tokens_per_second=speed))
            return SimpleNamespace(generate=lambda prompt, params: [result], plain=lambda: plain)

        compared = _compare(llm(30.0, plain=llm(10.0)), PROMPT, None)
        assert (compared["tokens_per_second"], compared["plain_tokens_per_second"]) == (30, 10)
        assert compared["speed_up"] == 3

    def test_no_number_is_null(self, model, capsys):
        assert main(["generate", PROMPT, "--model", model, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["metrics"]["acceptance_rate"] is None
        assert "compare" not in report

    def test_interrupted(self, generate, monkeypatch):
        interrupt_after(monkeypatch, calls=2)
        exit_code, out, _ = generate(PROMPT, "--json")
        report = json.loads(out)
        assert (exit_code, report["text"], report["finish_reason"]) == (130, "o東", None)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--temperature", "-1"], "temperature must be 0 or in [1.2e-38, 3.4e+38], got -1.0"),
            (["--max-tokens", "0"], "max_tokens must be in [1, 2147483647], got 0"),
            (["--stop", ""], "stop must be made of non-empty strings"),
            (
                ["--model", "./no/such"],
                "model must be a directory with a Hugging Face checkpoint, or the name of",
            ),
            (["--num-draft-tokens", "0", "--compare"], "--compare needs drafts"),
            (["--max-length", "500"], "max_length must be in [2, 192], the model's limit, got 500"),
            (["--num-draft-tokens", "-2"], "num_draft_tokens must be an integer >= 0 or 'auto', got -2"),
        ],
    )
    def test_value(self, generate, arguments, message):
        exit_code, out, err = generate(PROMPT, *arguments)
        assert (exit_code, out) == (2, "")
        assert err.startswith(f"specjax: error: {message}")
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["generate", "--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
            (
                ["generate", "--num-draft-tokens", "x"],
                "argument --num-draft-tokens: must be an integer or auto, got 'x'",
            ),
            (["generate", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
            (["nonsense"], "argument COMMAND: invalid choice: 'nonsense'"),
            (["generate", "a", "b"], "unrecognized arguments: b"),
            (["generate", "--temp", "0"], "unrecognized arguments: --temp; did you mean '--temperature'?"),
        ],
    )
    def test_usage(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(f"specjax: error: {message}")
        assert err.count("\n") == 1

    def test_no_prompt(self, generate, monkeypatch):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        assert generate() == (
            2,
            "",
            "specjax: error: PROMPT must be an argument or come from standard input, got neither\n",
        )

    def test_prompt_is_not_text(self, generate, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
        message = "specjax: error: PROMPT must be UTF-8 on standard input, got byte 0xff at 2\n"
        assert generate() == (2, "", message)

    def test_missing_package(self, generate, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        exit_code, _, err = generate(PROMPT)
        assert exit_code == 2
        assert "tokenizers is missing" in err
        assert install_command("cli", "tokenizers") in err


class TestProcess:
    def test_standard_input(self, model):
        done = process("generate", "-", "--model", model, text=PROMPT)
        assert (done.returncode, done.stdout) == (0, TEXT + "\n")
        assert "no drafts" in done.stderr

    def test_json_alone_on_standard_output(self, model):
        done = process("generate", "--model", model, "--draft", model, "--num-draft-tokens", "1", "--json", text=PROMPT)
        assert json.loads(done.stdout)["text"] == TEXT
        assert done.returncode == 0

    def test_error(self):
        done = process("generate", "a", "--model", "./no/such")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("specjax: error: model must be a directory")

    def test_help_is_quick(self):
        code = (
            "import sys; from specjax.cli import main\n"
            "try: main(['generate', '--help'])\n"
            "except SystemExit: print(sys.modules.keys() & {'rich', 'safetensors', 'tokenizers'})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60)
        assert "PROMPT" in done.stdout
        assert done.stdout.endswith("set()\n")

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as done:
            main(["--version"])
        assert done.value.code == 0
        assert capsys.readouterr().out.startswith("specjax 0.")
