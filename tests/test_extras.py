"""The command that installs missing packages, for each way in which specjax can be installed."""

import json
import sys
from importlib import metadata

import pytest

import specjax
from specjax import models, proposers
from specjax.cli import main
from specjax.sampling import guided
from specjax.validation.extras import install_command

REQUIREMENTS = (
    "jax>=0.10.2",
    "jinja2>=3.1; extra == 'cli'",
    "numpy>=2; extra == 'cli'",
    'not-there[x]<3,>=2.5; extra == "cli"',
    "not-here>=1; extra == 'other'",
    "nor-here>=1; extra == 'other'",
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Metadata of specjax as pip writes it into a folder of packages, where each test puts a direct_url.json."""
    folder = tmp_path / "specjax-1.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: specjax", "Version: 1", *(f"Requires-Dist: {one}" for one in REQUIREMENTS)]
    (folder / "METADATA").write_text("\n".join(lines))
    distribution = metadata.distribution
    own = metadata.Distribution.at(folder)
    monkeypatch.setattr(metadata, "distribution", lambda name: own if name == "specjax" else distribution(name))
    monkeypatch.setattr("specjax.validation.extras.ROOT", tmp_path)
    monkeypatch.setattr("specjax.validation.extras.installer", lambda: "pip install")
    return folder


class TestCommand:
    def test_installed_from_an_index(self, site):
        """Only missing packages are named: numpy and jinja2 are here."""
        assert install_command("cli", "jinja2") == 'pip install "not-there[x]<3,>=2.5"'
        assert install_command("other", "x") == 'pip install "not-here>=1" "nor-here>=1"'

    def test_nothing_of_the_extra_is_missing(self, site):
        """A package that a package of the extra needs is."""
        assert install_command("none", "jinja2") == 'pip install "jinja2"'

    @pytest.mark.parametrize("editable", [False, True])
    def test_checkout(self, site, tmp_path, editable):
        (tmp_path / "pyproject.toml").touch()
        (site / "direct_url.json").write_text(json.dumps({"url": "file:///gone", "dir_info": {"editable": editable}}))
        option = "-e " if editable else ""
        assert install_command("cli", "jinja2") == f'pip install {option}"{tmp_path}[cli]"'

    @pytest.mark.parametrize("name", ["a folder", "specjax-1-py3-none-any.whl"])
    def test_installed_from_a_path(self, site, tmp_path, name):
        source = tmp_path / name
        (site / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
        assert install_command("cli", "jinja2") == 'pip install "not-there[x]<3,>=2.5"'  # the path is gone
        source.mkdir()
        assert install_command("cli", "jinja2") == f'pip install "{source}[cli]"'

    def test_installed_from_a_repository(self, site):
        (site / "direct_url.json").write_text(json.dumps({"url": "https://example.com/specjax", "vcs_info": {}}))
        assert install_command("cli", "jinja2") == 'pip install "not-there[x]<3,>=2.5"'

    def test_copied(self, site, monkeypatch):
        def distribution(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "distribution", distribution)
        assert install_command("cli", "jinja2") == 'pip install "jinja2"'


@pytest.mark.parametrize(
    ("has_pip", "on_path", "expected"),
    [
        (True, True, "pip install "),
        (True, False, "{python} -m pip install "),
        (False, True, "uv pip install --python {python} "),
    ],
)
def test_installer(monkeypatch, tmp_path, has_pip, on_path, expected):
    python = tmp_path / "my python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_pip else None)
    monkeypatch.setattr("shutil.which", lambda name: str(python.parent / "pip") if on_path else "/usr/bin/pip")
    assert install_command("chat", "jinja2").startswith(expected.format(python=f"'{python}'"))


def hide(monkeypatch, package, *users):
    """Let the modules that use a package be imported anew, and not find it."""
    monkeypatch.setitem(sys.modules, package, None)
    for user in users:
        monkeypatch.delitem(sys.modules, user, raising=False)


USERS = {
    "safetensors": (
        "specjax.models.checkpoint",
        "specjax.models.files",
        "specjax.models.sharding",
        "specjax.models.tensors",
    ),
    "tokenizers": (),
    "outlines_core": (),
}


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("safetensors", "models", lambda: models.load),
        ("safetensors", "models", lambda: models.tensor_parallel),
        ("safetensors", "models", specjax.LLM),
        ("tokenizers", "models", specjax.LLM),
        ("safetensors", "models", lambda: proposers.load(models.EMBEDDED / "eagle3", None, num_draft_tokens=2)),
        ("outlines_core", "guided", lambda: guided.from_regex("a", [b"a", b""], [1])),
    ],
)
def test_without_the_package(monkeypatch, package, extra, call):
    hide(monkeypatch, package, *USERS[package])
    with pytest.raises(ModuleNotFoundError) as error:
        call()
    assert error.value.name == package
    assert str(error.value) == f"the package {package} is missing, install it with: {install_command(extra, package)}"


@pytest.mark.parametrize(
    ("package", "user", "command"),
    [
        ("safetensors", "specjax.models.checkpoint", ["generate", "a"]),
        ("uvicorn", "specjax.server.run", ["serve"]),
    ],
)
def test_commands_name_all_that_they_need(monkeypatch, capsys, package, user, command):
    hide(monkeypatch, package, user, "specjax.models.files", "specjax.models.tensors")
    assert main(command) == 2
    extra = "cli" if command[0] == "generate" else "serve"
    message = f"the package {package} is missing, install it with: {install_command(extra, package)}"
    assert capsys.readouterr().err == f"specjax: error: {message}\n"
