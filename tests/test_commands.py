"""The arguments of commands, their help, and completion in shells; models are stand-ins."""

import argparse
import json
import logging
import shutil
import subprocess
from dataclasses import fields
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from specjax import SamplingParams, guided, verifiers
from specjax.cli import _level, _parser, main
from specjax.cli import tune as cli_tune
from specjax.cli.sampling import LEFT_OUT, sampling_params
from specjax.decoding.drafters import num_fed
from specjax.engine.requests import Completion, Result
from specjax.proposers import ngram, within_budget
from specjax.server import bodies
from specjax.testing.toys import bigram_model
from specjax.theory import StepTimes


def parsed(*arguments):
    return _parser().parse_args(arguments)


def test_without_arguments_it_prints_its_help(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: specjax") and "generate" in out and err == ""


@pytest.mark.parametrize(
    "arguments, level",
    [
        (["serve", "-q"], logging.WARNING),
        (["serve", "-v"], logging.DEBUG),
        (["generate", "-q"], logging.WARNING),
        (["generate", "--json", "--verbose"], logging.DEBUG),
    ],
)
def test_quiet_and_verbose(arguments, level):
    assert _level(parsed(*arguments)) == level


class TestSampling:
    def test_every_field_is_an_argument(self):
        args = vars(parsed("generate"))
        assert {field.name for field in fields(SamplingParams)} - set(LEFT_OUT) <= args.keys()

    def test_whatever_a_server_takes_is_an_argument(self):
        taken = {
            name for name, kind in bodies.sampling_fields(9, 9).items() if not isinstance(kind, bodies.Unsupported)
        }
        assert taken <= vars(parsed("generate")).keys()

    def test_defaults(self):
        assert sampling_params(parsed("generate")) == SamplingParams(temperature=0, max_tokens=128)

    def test_values(self):
        given = "--stop a --stop b --stop-token-ids 3 --logit-bias 4=-1.5 --logit-bias 5=2 --bad-words no --ignore-eos"
        given += " --no-skip-special-tokens --temperature 0.5 --n 2 --best-of 3 --presence-penalty 0.5 --seed 7"
        assert sampling_params(parsed("generate", *given.split())) == SamplingParams(
            stop=["a", "b"],
            stop_token_ids=[3],
            logit_bias={4: -1.5, 5: 2.0},
            bad_words=["no"],
            ignore_eos=True,
            skip_special_tokens=False,
            temperature=0.5,
            n=2,
            best_of=3,
            presence_penalty=0.5,
            seed=7,
            max_tokens=128,
        )

    def test_guides(self, tmp_path):
        (tmp_path / "schema.json").write_text('{"type": "object"}')
        for arguments, source in (
            (["--regex", "a+"], guided.Regex("a+")),
            (["--choice", "a", "--choice", "b"], guided.Choices(["a", "b"])),
            (["--json-schema", str(tmp_path / "schema.json")], guided.JsonSchema('{"type": "object"}')),
        ):
            assert sampling_params(parsed("generate", *arguments)).guided_decoding == source

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--logit-bias", "4"], "argument --logit-bias: must be a token id and a number, as 42=-1.5, got '4'"),
            (["--regex", "a", "--choice", "b"], "argument --choice: not allowed with argument --regex"),
        ],
    )
    def test_wrong_arguments(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            parsed("generate", *arguments)
        assert capsys.readouterr().err == f"specjax: error: {message}\n"


class TestGenerate:
    @pytest.fixture
    def llm(self, monkeypatch):
        """A stand-in that gives each request two completions, and keeps the arguments of the command."""
        given = SimpleNamespace()

        def generate(prompts, params):
            texts = "one", "two"
            logprobs = None if params.logprobs is None else [{7: -0.5}]
            made = [Completion(text, [7], logprobs, "stop", None, i) for i, text in enumerate(texts)]
            return [Result(prompts[0], made, SimpleNamespace(num_drafted=0, num_tokens=2, seconds=1.0, **SPEEDS))]

        def load(args):
            given.args = args
            return SimpleNamespace(generate=generate)

        monkeypatch.setattr("specjax.cli.generate.load", load)
        return given

    def test_several_samples(self, llm, capsys):
        assert main(["generate", "a", "--n", "2", "--temperature", "1", "--verifier", "block"]) == 0
        out, err = capsys.readouterr()
        assert out == "[1] one\n[2] two\n" and "2 tokens" in err
        assert llm.args.verifier == "block"

    def test_quiet(self, llm, capsys):
        assert main(["generate", "a", "--n", "2", "--temperature", "1", "-q"]) == 0
        assert capsys.readouterr().err == ""

    def test_json(self, llm, capsys):
        assert main(["generate", "a", "--n", "2", "--temperature", "1", "--json", "--logprobs", "1"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["text"] == "one" and report["logprobs"] == [{"7": -0.5}]
        assert [other["text"] for other in report["others"]] == ["two"]

    @pytest.mark.parametrize("name", ["logprobs", "prompt-logprobs"])
    def test_a_text_shows_no_log_probabilities(self, name, llm, capsys):
        assert main(["generate", "a", f"--{name}", "1"]) == 2
        assert capsys.readouterr().err == f"specjax: error: --{name} needs --json, as a text does not show it\n"


class TestTune:
    @pytest.fixture
    def tune(self, monkeypatch, tmp_path, capsys):
        """Run the command with a stand-in for the models, whose steps take 1 + K / 4 seconds for each sequence."""
        sizes = {"proposer": ngram(4), "max_length": 1000}
        llm = SimpleNamespace(model=bigram_model(jnp.eye(5)), verifier=verifiers.match, **sizes)
        monkeypatch.setattr("specjax.cli.tune.load", lambda args: llm)
        monkeypatch.setattr(
            "specjax.cli.tune.step_seconds",
            lambda llm, proposer, batch, context: batch * (1 + (num_fed(proposer) - 1) / 4),
        )
        path = tmp_path / "times.json"

        def tune(*arguments):
            return main(["tune", "--out", str(path), *arguments]), *capsys.readouterr(), path

        return tune

    def test_a_file_and_the_best_lengths(self, tune):
        exit_code, out, _, path = tune("--batches", "1", "2", "--model", "x")
        assert exit_code == 0
        assert "| 2 | 2000.00 | 3000.00 | 4000.00 |" in out
        assert "| 1 | 2 | 2 | 2 | 4 | 4 |" in out  # at acceptance rates 0.5 to 0.9
        assert StepTimes.load(path).at(1) == {0: 1.0, 2: 1.5, 4: 2.0}
        assert json.loads(path.read_text())["model"] == "x"

    def test_a_tree(self, tune):
        """Steps of 2.5 s beside chains of 1.5 and 2 s."""
        _, out, _, path = tune("--batches", "1", "--tree", "7")
        assert "| B | K = 0 | K = 2 | K = 4 | tree of 7 nodes, K = 4 |" in out
        assert "| 1 | 1000.00 | 1500.00 | 2000.00 | 2500.00 |" in out
        assert out.endswith("| 1 | 2.92 | 3.27 | 3.65 | 4.20 | - |\n")  # 2.5 (1 + 0.5 + 0.25) / 1.5, ...
        assert StepTimes.load(path).at(1) == {0: 1.0, 2: 1.5, 4: 2.0, 6: 2.5}
        _, out, _, path = tune("--batches", "1", "--tree", "9,7")
        assert "| tree of 7 nodes, K = 4 | tree of 9 nodes, K = 4 |" in out
        assert sorted(StepTimes.load(path).at(1)) == [0, 2, 4, 6, 8]
        with pytest.raises(SystemExit):
            tune("--tree", "7,x")

    def test_a_budget(self, tune, monkeypatch):
        """Steps of 1.2 s beside chains of 1, 1.5 and 2 s."""
        proposer = within_budget(ngram(4), 1)
        llm = SimpleNamespace(
            proposer=proposer, model=bigram_model(jnp.eye(5)), verifier=verifiers.match, max_length=1000
        )
        monkeypatch.setattr("specjax.cli.tune.load", lambda args: llm)
        monkeypatch.setattr(
            "specjax.cli.tune.step_seconds",
            lambda llm, proposer, *_: (
                1.2 if getattr(proposer, "is_shared", False) else 1 + proposer.num_draft_tokens / 4
            ),
        )
        _, out, _, path = tune("--batches", "1", "--drafts-per-row", "1")
        assert "| B | K = 0 | K = 2 | K = 4 | 4 drafts, 1 a row verified |" in out
        assert out.endswith("| 1 | 1.40 | 1.57 | 1.75 | - | - |\n")  # 1.2 (1 + 0.5 + 0.25) / 1.5, ...
        assert StepTimes.load(path).at(1) == {0: 1.0, 2: 1.5, 4: 2.0, 5: 1.2}

    def test_wrong_arguments(self, tune):
        exit_code, out, err, _ = tune("--batches", "0")
        assert (exit_code, out, err) == (2, "", "specjax: error: --batches must be at least 1, got 0\n")
        exit_code, out, err, _ = tune("--context", "581")
        assert (exit_code, out, err) == (2, "", "specjax: error: --context must be at most 580, got 581\n")

    @pytest.mark.parametrize("name", [".", "none/times.json"])
    def test_a_file_that_cannot_be_written(self, tune, tmp_path, name):
        """The error comes before the measurement."""
        exit_code, out, err, _ = tune("--out", str(tmp_path / name))
        message = f"--out must be a file in a directory that exists, got {tmp_path / name}"
        assert (exit_code, out, err) == (2, "", f"specjax: error: {message}\n")

    def test_seconds_of_a_step_are_without_the_call(self, monkeypatch):
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(cli_tune, "time", SimpleNamespace(perf_counter=lambda: clock.now))

        def steps(count):
            clock.now += 100 + 0.5 * count

        assert cli_tune.slope(steps) == pytest.approx(0.5)

    @pytest.mark.slow
    def test_steps_are_taken(self):
        """A bigram model takes them; a context too long for it is refused."""
        llm = SimpleNamespace(
            model=bigram_model(jnp.eye(5)), proposer=ngram(2), verifier=verifiers.rejection, max_length=300
        )
        assert cli_tune.step_seconds(llm, llm.proposer, 2, 4) > 0
        with pytest.raises(ValueError, match="--context must be at most 48, got 100"):
            cli_tune.step_seconds(llm, llm.proposer, 2, 100)
        with pytest.raises(ValueError, match="--num-draft-tokens must be less than 3 for a model of 300 tokens, as "):
            cli_tune.step_seconds(llm, ngram(3), 2, 4)


SPEEDS = {"tokens_per_second": 2.0, "_asdict": lambda: {}}


class TestCompletion:
    def complete(self, shell, script, *words):
        """The words with which bash goes on after `words`."""
        if shutil.which("bash") is None:
            pytest.skip("bash is not installed")
        array = " ".join(f"'{word}'" for word in words)
        run = (
            f'{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _specjax; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run([shell, "-c", run], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split()

    def test_bash(self, capsys, tmp_path, monkeypatch):
        assert main(["completion", "bash"]) == 0
        script = capsys.readouterr().out
        assert self.complete("bash", script, "specjax", "ser") == ["serve"]
        assert self.complete("bash", script, "specjax", "generate", "--verif") == ["--verifier"]
        assert self.complete("bash", script, "specjax", "generate", "--verifier", "b") == ["block"]
        assert self.complete("bash", script, "specjax", "completion", "f") == ["fish"]
        assert self.complete("bash", script, "specjax", "generate", "--seed", "") == []
        monkeypatch.chdir(tmp_path)
        (tmp_path / "checkpoint").mkdir()
        assert self.complete("bash", script, "specjax", "generate", "--model", "ch") == ["checkpoint"]

    def test_zsh_runs_the_script_of_bash(self, capsys):
        main(["completion", "bash"])
        bash = capsys.readouterr().out
        main(["completion", "zsh"])
        assert capsys.readouterr().out == f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{bash}"

    def test_fish(self, capsys):
        assert main(["completion", "fish"]) == 0
        lines = capsys.readouterr().out.splitlines()
        start = "complete -c specjax -n '__fish_seen_subcommand_from generate' -l"
        assert any(line.startswith(f"{start} verifier -x -a 'rejection block match typical'") for line in lines)
        assert any(line.startswith(f"{start} model -r -F") for line in lines)

    def test_every_command_and_option_is_there(self, capsys):
        main(["completion", "bash"])
        script = capsys.readouterr().out
        (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
        for name, command in commands.choices.items():
            (line,) = (line for line in script.splitlines() if line.strip().startswith(f"{name})"))
            assert {o for a in command._actions for o in a.option_strings} <= set(line.replace("'", " ").split())


def test_help_has_one_sign_for_a_percentage():
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert [name for name, command in commands.choices.items() if "%%" in command.format_help()] == []
