"""Mistakes of a first hour: each error says its cause, then what to do, and asks about words that are nearly right."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from test_llm import random_tensors, write_checkpoint

from specjax import LLM, decode, models, proposers, sampling
from specjax.cli import main
from specjax.models import checkpoint
from specjax.models.quantize_files import write_quantized
from specjax.operations.dispatch import check_implementation
from specjax.theory import StepTimes
from specjax.validation import suggestion


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("errors") / "llama-3", random_tensors(0))


def message(call, *arguments, **options):
    """The text of the error that a call ends with, which is of a kind that the command prints."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        call(*arguments, **options)
    return str(error.value)


def test_suggestion():
    assert suggestion("ngrams", ["ngram", "other"]) == "; did you mean 'ngram'?"
    assert suggestion("bf16", ["float32", "bfloat16", "float16"]) == "; did you mean 'bfloat16'?"
    assert suggestion(7, ["ngram"]) == suggestion("far away", ["ngram"]) == suggestion("x", []) == ""


class TestWords:
    def test_draft(self, directory):
        assert message(LLM, directory, "ngrams").endswith("got 'ngrams'; did you mean 'ngram'?")
        assert message(LLM, "ngrams").endswith("got 'ngrams'")  # no model is called ngram

    def test_path(self, directory):
        """A directory beside it has nearly this name."""
        assert message(LLM, str(directory.parent / "lama-3")).endswith("lama-3'; did you mean 'llama-3'?")
        assert message(models.load, directory.parent / "lama-3").endswith("did you mean 'llama-3'?")

    @pytest.mark.parametrize("wrong", [5, b"llama-3"])
    def test_no_path(self, wrong):
        assert message(LLM, wrong) == f"model must be a path or a name on the Hugging Face Hub, got {wrong!r}"
        assert message(models.load, wrong) == f"directory must be a path, got {wrong!r}"

    def test_no_mesh(self, directory):
        model = models.load(directory)
        for call in (partial(LLM, directory, mesh=3), partial(models.load, directory, mesh=3)):
            assert message(call) == "mesh must be a jax.sharding.Mesh, got 3"
        assert message(models.tensor_parallel, model, 3) == "mesh must be a jax.sharding.Mesh, got 3"

    def test_other_types(self, directory):
        model = models.load(directory)
        assert message(models.with_feature_layers, model, 1) == "feature_layers must be a sequence of layers, got 1"
        assert message(models.with_feature_layers, 5, (1,)) == "model must be a specjax.Model, got int"
        assert message(StepTimes, 5).endswith("a number of sequences and of drafts, got 5")
        assert message(StepTimes, {1: 2.0}).endswith("a number of sequences and of drafts, got {1: 2.0}")
        assert message(sampling.batch, 5).endswith("one for each row, got 5")
        assert message(proposers.fallback, proposers.ngram(2), 6) == "second must be a proposer, got 6"
        assert message(sampling.batch, [5]).endswith("one for each row, got [5]")
        rows, key = sampling.batch([sampling.SamplingParams()]), jax.random.key(0)
        prompts, lengths = jnp.ones((1, 2), jnp.int32), jnp.array([2])
        given = prompts, lengths, rows, key
        assert message(decode.prefill, 5, None, *given, max_length=4) == "model must be a specjax.Model, got int"
        assert message(LLM.of, model, models.Checkpoint(directory).tokenizer(), eos_token_ids=5).endswith("got 5")

    def test_home(self, directory, monkeypatch):
        monkeypatch.setenv("HOME", str(directory.parent))
        assert message(LLM, "~/llama-3").endswith(f"got '~/llama-3'; did you mean '{directory}'?")

    def test_values(self, directory):
        assert message(LLM, directory, dtype="bfloat61").endswith("got 'bfloat61'; did you mean 'bfloat16'?")
        assert message(models.load, directory, dtype="float64").endswith("got float64")  # which is no slip
        assert message(LLM, directory, verifier="rejecton").endswith("got 'rejecton'; did you mean 'rejection'?")
        assert message(check_implementation, "palas").endswith("got 'palas'; did you mean 'pallas'?")

    @pytest.mark.parametrize(
        ("arguments", "end"),
        [
            (["serve", "--verifier", "blok"], "; did you mean 'block'?"),
            (["generate", "--dtype", "bfloat"], "; did you mean 'bfloat16'?"),
            (["genrate"], "; did you mean 'generate'?"),
            (["serve", "--drafts", "ngram"], "unrecognized arguments: --drafts ngram; did you mean '--draft'?"),
            (["generate", "--zzzz"], "unrecognized arguments: --zzzz"),
        ],
    )
    def test_command(self, capsys, arguments, end):
        with pytest.raises(SystemExit):
            main(arguments)
        assert capsys.readouterr().err.endswith(f"{end}\n")

    def test_platform(self, monkeypatch, capsys):
        def devices():
            raise RuntimeError("Unable to initialize backend 'cudaa'")

        monkeypatch.setattr(jax, "devices", devices)
        monkeypatch.setenv("JAX_PLATFORMS", "cudaa")
        assert main(["generate", "a"]) == 2
        start = "specjax: error: JAX has no device of JAX_PLATFORMS=cudaa; did you mean 'cuda'? (Unable to"
        assert capsys.readouterr().err.startswith(start)


class TestDirectories:
    def test_file(self, directory, tmp_path, monkeypatch):
        monkeypatch.chdir(directory.parent)
        for weights in (directory / "model.safetensors", "llama-3/config.json"):  # which might be org/name
            assert message(LLM, str(weights)).endswith(
                f"got '{weights}'; it is a file: give the directory that holds it"
            )
        gguf = tmp_path / "model.gguf"
        gguf.touch()
        for call in (LLM, models.load):
            assert "must be a GGUF file, got a file of 0 bytes" in message(call, str(gguf))

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ({}, "is empty; it must hold config.json"),
            (
                {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": ""},
                "holds an adapter (PEFT) and no whole model; merge it into org/base and save that model",
            ),
            ({"adapter_config.json": "{"}, "holds an adapter (PEFT) and no whole model; merge it into its base model"),
            ({"a.gguf": ""}, "holds a GGUF file and no config.json; give the path of the file"),
            ({"snapshots/ab/config.json": "{}"}, "has no config.json, but a folder in it has; did you mean '{}/snap"),
            ({"7b/config.json": "{}"}, "has no config.json, but a folder in it has; did you mean '{}/7b'?"),
            ({"README.md": ""}, "has no config.json; give the directory of a whole checkpoint"),
        ],
    )
    def test_no_checkpoint(self, tmp_path, files, text):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        for call in (LLM, models.load):
            assert message(call, tmp_path).startswith(f"{tmp_path} {text.replace('{}', str(tmp_path))}")

    def test_weights_of_torch(self, directory, tmp_path):
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.00.pth")
        text = "holds weights that torch.save wrote (consolidated.00.pth) and no model.safetensors or pytorch_model.bin"
        assert message(models.load, tmp_path).startswith(f"{tmp_path} {text}; save")
        (tmp_path / "consolidated.00.pth").rename(tmp_path / "pytorch_model.bin")
        assert " must be a whole zip archive, as torch.save writes it" in message(models.load, tmp_path)
        text = "holds weights that torch.save wrote (pytorch_model.bin) and no model.safetensors or model.safetensors."
        quantize = partial(write_quantized, out=tmp_path / "out", format="int8")
        assert message(quantize, models.Checkpoint(tmp_path)).startswith(f"{tmp_path} {text}")
        (tmp_path / "pytorch_model.bin").unlink()
        assert " has no model.safetensors or pytorch_model.bin; give" in message(models.load, tmp_path)

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_pointer_of_git(self, directory, tmp_path, name):
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        text = f"{tmp_path / name} is a pointer of Git LFS, not the file itself; run: git lfs pull"
        assert message(models.load, tmp_path) == text


class TestPairs:
    def test_drafter_as_model(self):
        head = models.EMBEDDED / "eagle3"
        start = f"model must be a target, got a drafter (eagle3) in {head}; give it as draft, and the target"
        assert message(LLM, head).startswith(start)

    def test_other_errors_of_a_model_stay(self, directory, tmp_path):
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
        assert message(LLM, tmp_path).startswith("hidden_act in ")

    def test_head_of_another_target(self, directory):
        start = "the drafter is made for another target: "
        assert message(LLM, directory, models.EMBEDDED / "eagle3").startswith(start)
        assert message(LLM, directory, models.EMBEDDED / "dflash").startswith(start)

    def test_draft_model_of_another_vocabulary(self, directory):
        assert "draft must have the vocabulary of the target" in message(LLM, directory, models.EMBEDDED / "draft")

    def test_model_as_drafter_on_features(self, directory):
        text = message(proposers.load, directory, models.load(directory), num_draft_tokens=2)
        assert text.startswith(f"{directory} holds an ordinary model, not a drafter on features; as a draft model it")


class TestMemory:
    @pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
    def test_load(self, directory, monkeypatch, error):
        def full(config, tensors):
            raise error("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

        monkeypatch.setitem(checkpoint.BUILD, "llama", full)
        with pytest.raises(MemoryError, match=r"^the weights of .* in float32 do not fit .*; load them in bfl"):
            models.load(directory)

    def test_other_errors_of_the_device_stay(self, directory, monkeypatch):
        def broken(config, tensors):
            raise jax.errors.JaxRuntimeError("INTERNAL: no")

        monkeypatch.setitem(checkpoint.BUILD, "llama", broken)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            models.load(directory)

    def test_command(self, directory, monkeypatch, capsys):
        def full(*arguments, **options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

        monkeypatch.setattr(LLM, "stream", full)
        assert main(["generate", "a", "--model", str(directory), "--no-compilation-cache"]) == 2
        _, err = capsys.readouterr()
        assert err.splitlines()[-1].startswith("specjax: error: the memory of the device is full; lower --max-length")
        assert err.endswith("Out of memory\n")


@pytest.mark.parametrize("command", ["generate", "serve", "batch"])
@pytest.mark.parametrize(
    ("options", "is_said"), [([], True), (["--draft", "ngram"], False), (["--num-draft-tokens", "0"], False)]
)
def test_a_target_without_a_drafter(directory, monkeypatch, capsys, command, options, is_said):
    """It decodes plainly, which each command says in one line."""

    def stop(*arguments, **options):
        raise ValueError("enough")

    for begin in ("specjax.LLM.stream", "specjax.server.run.serve", "specjax.Engine.of"):
        monkeypatch.setattr(begin, stop)
    requests = directory.parent / "requests.jsonl"
    requests.touch()
    arguments = {"generate": ["a"], "serve": [], "batch": [str(requests), "--out", f"{requests}.out"]}
    shared = ["--model", str(directory), "--no-compilation-cache"]
    assert main([command, *arguments[command], *shared, *options]) == 2
    line = (
        f"specjax: warning: no --draft is given, so {directory} decodes plainly; give --draft ngram, a head trained for"
    )
    err = capsys.readouterr().err
    assert [said.startswith(line) for said in err.splitlines() if "--draft" in said] == [True] * is_said
