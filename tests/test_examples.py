"""The notebooks run from their first cell to their last."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NEEDS = {"model_from_a_module": ("flax", "tokenizers"), "train_a_head": ("optax", "matplotlib")}


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    if "matplotlib" in NEEDS.get(path.stem, ()):
        import matplotlib

        matplotlib.use("agg")
    namespace = {"__name__": path.stem}
    for cell in cells(path):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name} {cell['id']}", "exec"), namespace)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells(path))
    assert cells(path)[0]["source"][0].startswith("# ")
