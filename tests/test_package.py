"""The package as it is installed: what importing loads, the wheel, the README and the docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import specjax

ROOT = Path(__file__).parent.parent
NEEDS_CHECKPOINTS = "specjax.models.checkpoint"


def python(code: str, *, path: Path = ROOT, cwd: Path = ROOT) -> str:
    """What a process of its own prints."""
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in ("", str(ROOT))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *others])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["specjax", "specjax.models", "specjax.testing"])
def test_import_is_light(module):
    heavy = ("flax", "optax", "chex", "tokenizers", "safetensors", "transformers", "rich", "matplotlib", "torch")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert python(code) == "[]"


def test_kernels_know_nothing_of_specjax():
    assert python("import sys, pallas_kernels.cut; print('specjax' in sys.modules)") == "False"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], capture_output=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_both_packages_and_the_weights(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"specjax", "pallas_kernels"}
    weights = [name for name in names if name.endswith(".safetensors")]
    assert len(weights) == 3
    sizes = [zipfile.ZipFile(wheel).getinfo(name).file_size for name in weights]
    assert max(sizes) <= 15e6
    assert sum(sizes) <= 32e6
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_works_outside_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import specjax, pallas_kernels; print(specjax.__file__); "
        "print(specjax.LLM().generate('def f(', specjax.SamplingParams(temperature=0, max_tokens=4))[0].token_ids)"
    )
    file, tokens = python(code, path=tmp_path / "site", cwd=tmp_path).splitlines()
    assert file.startswith(str(tmp_path))
    assert len(tokens.split(",")) == 4


def test_version_is_that_of_the_project():
    assert f'version = "{specjax.__version__}"' in (ROOT / "pyproject.toml").read_text()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(page: Path, index: int, namespace: dict[str, Any]) -> None:
    exec(compile(blocks(page)[index], f"{page.name} block {index}", "exec"), namespace)


def test_readme_has_python():
    assert len(blocks(PAGES[0])) >= 3


@pytest.mark.parametrize("index", range(len(blocks(PAGES[0]))))
def test_readme_block_runs(index):
    """Each for itself: a reader copies one."""
    run(PAGES[0], index, {"__name__": "readme"})


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_page_runs(page):
    """The blocks of a page in their order, as its reader runs them."""
    namespace = {"__name__": page.stem}
    for index in range(len(blocks(page))):
        run(page, index, namespace)


def modules() -> list[str]:
    found = [
        m.name
        for p in (specjax, importlib.import_module("pallas_kernels"))
        for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")
    ]
    return sorted(name for name in found if not name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
