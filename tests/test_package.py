"""The package as it is installed: what importing loads, the wheel, the pages of documentation and the docstrings."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import cli, models

ROOT = Path(__file__).parent.parent


def python(code: str, *, path: Path = ROOT, cwd: Path = ROOT) -> str:
    """The output of a separate process."""
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in ("", str(ROOT))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *others])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_imports_are_light():
    """Kernels import nothing of specjax, and specjax none of the packages of its extras."""
    names = [m.name for m in pkgutil.iter_modules(importlib.import_module("pallas_kernels").__path__)]
    kernels = ", ".join(f"pallas_kernels.{name}" for name in names)
    heavy = (
        "optax",
        "orbax",
        "chex",
        "tokenizers",
        "safetensors",
        "transformers",
        "rich",
        "matplotlib",
        "torch",
        "starlette",
    )
    modules = "specjax, specjax.models, specjax.testing, specjax.training"
    code = f"import sys, {kernels}; print('specjax' in sys.modules)\n"
    code += f"import {modules}; print([m for m in {heavy} if m in sys.modules])"
    assert python(code).splitlines() == ["False", "[]"]


# Builds a distribution as `python -m hatchling` does, with nothing compressed: compressing takes most of the time.
BUILD = """
import runpy, zlib
compressobj = zlib.compressobj
zlib.compressobj = lambda level=-1, *args, **options: compressobj(0, *args, **options)
runpy.run_module("hatchling", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Build a distribution, "wheel" or "sdist"; gives its path."""
    pytest.importorskip("hatchling")

    def build(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-c", BUILD, "build", "-t", kind, "-d", str(out)]
        done = subprocess.run(command, capture_output=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        (path,) = (path for path in out.iterdir() if path.is_file())
        return path

    return build


@pytest.fixture(scope="module")
def wheel(build):
    return build("wheel")


@pytest.mark.slow
def test_wheel_holds_both_packages_and_the_weights(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"specjax", "pallas_kernels"}
    weights = [name for name in names if name.endswith(".safetensors")]
    assert {name.split("/")[-2] for name in weights} == {"target", "draft", "eagle3", "dflash"}
    sizes = [zipfile.ZipFile(wheel).getinfo(name).file_size for name in weights]
    heads = [size for size, name in zip(sizes, weights, strict=True) if "smollm2" in name]
    assert sum(heads) <= 32e6 and max(set(sizes) - set(heads)) <= 15e6
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"specjax/py.typed", "pallas_kernels/py.typed"} <= set(names)


@pytest.mark.slow
def test_wheel_works_outside_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import specjax, pallas_kernels; print(specjax.__file__); "  # then README's request, which is compiled once
        "params = specjax.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True); "
        "print(specjax.LLM().generate('def fibonacci(n):', params)[0].token_ids)"
    )
    file, tokens = python(code, path=tmp_path / "site", cwd=tmp_path).splitlines()
    assert file.startswith(str(tmp_path))
    assert len(tokens.split(",")) == 64


@pytest.mark.slow
def test_version_is_that_of_the_package(wheel):
    assert wheel.name.startswith(f"specjax-{specjax.__version__}-")


@pytest.mark.slow
def test_sdist_holds_documentation_and_tests(build):
    with tarfile.open(build("sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = [page.relative_to(ROOT).as_posix() for page in PAGES]
    others = "CITATION.cff", "mkdocs.yml", "docs/images/loop.svg", "tests/test_package.py", "scripts/test"
    assert {*pages, *others} <= names


README = ROOT / "README.md"
PAGES = [README, *sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {README})]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def run(page: Path, index: int, namespace: dict[str, Any]) -> None:
    exec(compile(blocks(page)[index], f"{page.name} block {index}", "exec"), namespace)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(blocks(README))))
def test_readme_block_runs(index):
    """Each for itself: a reader copies one."""
    run(README, index, {"__name__": "readme"})


NUM_DEVICES = {ROOT / "docs" / "devices.md": 4}  # that a page needs, where it is more than one
FRAMEWORKS = {"nnx": "flax", "linen": "flax", "equinox": "equinox"}  # the package that each of these pages needs
NEED_A_SERVER = [ROOT / "docs" / "server.md", ROOT / "docs" / "replicas.md"]  # test_server runs the blocks of the first


@pytest.fixture(scope="module")
def family_of_few_layers(tmp_path_factory):
    """The embedded family with three of the target's 16 layers: README's request and the wheel run all of them."""
    copy = shutil.copytree(models.EMBEDDED, tmp_path_factory.mktemp("family") / "embedded")
    target, num_layers = copy / "target", 3
    tensors = {}
    for path in target.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (target / "model.safetensors.index.json").unlink()
    names = [name for name in tensors if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers]
    save_file({name: tensors[name] for name in names}, target / "model.safetensors")
    for directory, change in (
        (target, {"num_hidden_layers": num_layers}),
        (copy / "eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
        (copy / "dflash", {"dflash_config": {"mask_token_id": 125, "target_layer_ids": [0, 1, 2]}}),
    ):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | change))
    return copy


@pytest.fixture
def few_layers(family_of_few_layers, monkeypatch):
    monkeypatch.setattr(models, "EMBEDDED", family_of_few_layers)


@pytest.mark.slow
@pytest.mark.usefixtures("few_layers")
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if blocks(page) and page not in NEED_A_SERVER], ids=page_name
)
def test_page_runs(page):
    """The blocks of a page in their order, as its reader runs them."""
    if page.stem in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[page.stem], reason="specjax needs no framework")
    if jax.device_count() < NUM_DEVICES.get(page, 1):
        pytest.skip(f"needs {NUM_DEVICES[page]} devices, as CPUs have in these tests")
    namespace = {"__name__": page.stem}
    for index in range(len(blocks(page))):
        run(page, index, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_says_its_language(page):
    opened = re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE)[::2]
    assert set(opened) <= {"python", "bash", "toml", "yaml", "text", "bibtex"}


def command_lines() -> list[str]:
    """The commands in the shell blocks of all pages, without comments."""
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return sorted({shlex.join(shlex.split(line.split(" | ")[-1], comments=True)) for line in lines} - {""})


@pytest.mark.parametrize("line", command_lines())
def test_command_of_a_page_exists(line):
    program, *arguments = shlex.split(line)
    if program == "compute-sanitizer":  # a tool and the program that it watches
        program, *arguments = arguments[2:]
    if program == "specjax":
        cli._parser().parse_args(arguments)
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program not in ("pip", "curl", "serve"):  # the last is Ray's
        assert os.access(ROOT / program, os.X_OK)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_of_a_page_lead_somewhere(page):
    """scripts/docs checks the links of the site; README and its neighbours are no part of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.is_file(), target
            assert not anchor or anchor in anchors(linked), target


def modules() -> list[str]:
    found = [
        m.name
        for p in (specjax, importlib.import_module("pallas_kernels"))
        for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")
    ]
    return sorted(name for name in found if not name.endswith("__main__"))


@pytest.mark.slow
@pytest.mark.usefixtures("few_layers")
@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    if name == "specjax.server.ray":
        pytest.importorskip("ray")  # which the tests do without
    assert doctest.testmod(importlib.import_module(name)).failed == 0
