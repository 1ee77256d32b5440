"""Checkpoints by their name on the Hugging Face Hub, in a cache laid out here as huggingface_hub does; no network."""

import hashlib
import re
import shutil
import sys

import pytest
from test_llm import SENTENCE, chain_tensors, make_tokenizer, write_checkpoint

from specjax import LLM
from specjax.cli import main
from specjax.models.hub import FILES, TORCH_FILES, find_checkpoint, find_drafter
from specjax.proposers import DraftModel
from specjax.validation.extras import install_command

constants = pytest.importorskip("huggingface_hub.constants")
hub_utils = pytest.importorskip("huggingface_hub.utils")

PROMPT, TEXT = SENTENCE[0], SENTENCE[1:]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    ids = [*make_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1]
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "model", chain_tensors(ids), num_layers=1, hidden=128)


@pytest.fixture
def cache(tmp_path, monkeypatch, checkpoint):
    """A cache of the Hub, offline, with the checkpoint as org/name: of its main branch, and without weights at v0."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for revision, commit in (("main", "a" * 40), ("v0", "b" * 40)):
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if revision == "main" or path.suffix != ".safetensors":
                blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
                shutil.copy(path, blob)
                (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return repository


class TestCache:
    def test_target_and_draft(self, cache):
        llm = LLM("org/name", "org/name@main")
        assert isinstance(llm.proposer, DraftModel)
        assert llm.tokenizer.encode(PROMPT, add_special_tokens=False).ids == make_tokenizer().encode(PROMPT).ids[1:]

    @pytest.mark.slow
    def test_command(self, cache, capsys):
        assert main(["generate", PROMPT, "--model", "org/name"]) == 0
        assert capsys.readouterr().out == TEXT + "\n"

    def test_revision(self, cache):
        assert find_checkpoint("model", "org/name@main") == cache / "snapshots" / ("a" * 40)
        assert find_checkpoint("model", "org/name@v0") == cache / "snapshots" / ("b" * 40)

    def test_directory_goes_first(self, cache, tmp_path):
        (tmp_path / "org" / "name").mkdir(parents=True)
        assert str(find_checkpoint("model", "org/name")) == "org/name"

    @pytest.mark.parametrize("name", ["org/other", "org/name@v2"])
    def test_is_not_there(self, cache, name, capsys):
        message = (
            f"draft must be a directory with .*, got '{name}', which is no directory and cannot be fetched: .*cache"
        )
        with pytest.raises(ValueError, match=message):
            LLM("org/name", name)
        assert main(["generate", PROMPT, "--model", name]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_drafters_may_be_files_of_torch(cache, monkeypatch):
    """Where there are safetensors, no others are fetched."""
    fetched = []

    def download(repository, revision, allow_patterns):
        fetched.append(list(allow_patterns))
        return cache / "snapshots" / (40 * ("a" if revision is None else "b"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    find_drafter("org/name")
    assert fetched == [list(FILES)]
    find_drafter("org/name@v0")
    find_checkpoint("model", "org/name@v0")
    assert fetched[1:] == 2 * [list(FILES), list(TORCH_FILES)]
    kept = hub_utils.filter_repo_objects(["pytorch_model.bin", "medusa_lm_head.pt", "x.bin"], allow_patterns=fetched[2])
    assert list(kept) == ["pytorch_model.bin", "medusa_lm_head.pt"]


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "./org/name", "../name", "/org/name", "org/name/", "org/na me", "org/"]
)
def test_no_name(cache, name):
    message = "model must be a directory with a Hugging Face checkpoint, or the name of one on the Hugging Face Hub "
    with pytest.raises(ValueError) as error:
        LLM(name)
    assert str(error.value) == f"{message}(org/name), got {name!r}"


def test_without_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    command = install_command("hf", "huggingface_hub")
    message = f"got 'org/name', which is no directory; to fetch it, install huggingface_hub: {command}"
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM("org/name")


def test_only_what_is_read_is_fetched():
    read = [
        "config.json",
        "hf_quant_config.json",
        "generation_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
    ]
    unread = [
        "README.md",
        "model.gguf",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "original/tokenizer.model",
        "onnx/model.onnx",
        "onnx/config.json",
        "tf_model.h5",
        "adapter_model.safetensors",
    ]
    kept = hub_utils.filter_repo_objects([*read, *unread], allow_patterns=list(FILES))
    assert list(kept) == read
