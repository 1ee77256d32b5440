"""Which module imports which: no two of them need each other, wherever in a file the import stands."""

import ast
import importlib
from pathlib import Path

import pytest

import specjax

FOLDER = Path(specjax.__file__).parent


def module_names(folder):
    """Return the path of each module, by its name."""
    paths = sorted(folder.rglob("*.py"))
    parts = {path: path.relative_to(folder.parent).with_suffix("").parts for path in paths}
    return {".".join(each[:-1] if each[-1] == "__init__" else each): path for path, each in parts.items()}


def is_for_types(node):
    """Return whether a node is the test `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node):
    """Yield the import statements below a node, without the imports for type checkers."""
    for child in ast.iter_child_nodes(node):
        if is_for_types(child):
            yield from (each for other in child.orelse for each in [other, *imports(other)])
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from imports(child)


def imported(tree, known):
    """Return the names of the known modules that a file names in its imports."""
    found = set()
    for node in imports(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "specjax has absolute imports alone"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(submodules & known)
            if not submodules <= known:
                found.add(node.module)
    return found & known


def groups(graph):
    """Return the strongly connected groups with more than one node, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            group, stack[place:] = stack[place:], []
            found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return [group for group in found if len(group) > 1]


def graph_of(folder):
    paths = module_names(folder)
    return {name: imported(ast.parse(path.read_text()), set(paths)) - {name} for name, path in paths.items()}


def test_no_modules_import_each_other():
    graph = graph_of(FOLDER)
    assert sum(map(len, graph.values())) > 300  # the imports were found
    assert groups(graph) == []


FILES = {
    "at the start": ("from room import b", "from room import a"),
    "in a function": ("from room import b", "def f():\n    from room.a import x"),
    "by the package": ("import room", "from room.a import x"),
    "in the other case": ("import room.b", "if TYPE_CHECKING:\n    pass\nelse:\n    import room.a"),
}


@pytest.mark.parametrize("case", FILES)
def test_circles_are_found(tmp_path, case):
    folder = tmp_path / "room"
    folder.mkdir()
    a, b = FILES[case]
    (folder / "a.py").write_text(a)
    (folder / "b.py").write_text(b)
    (folder / "__init__.py").write_text("from room import b" if case == "by the package" else "")
    assert [{"room.a", "room.b"} <= set(group) for group in groups(graph_of(folder))] == [True]
    (folder / "b.py").write_text("if TYPE_CHECKING:\n    from room import a\nimport room.c")
    assert groups(graph_of(folder)) == []


def test_few_modules_stand_outside_of_a_room():
    assert len(list(FOLDER.glob("*.py"))) <= 14


PUBLIC = ("checks", "cli", "decode", "distributions", "keys", "metrics", "pages", "parallel", "prompts", "ragged")


@pytest.mark.parametrize("name", [*PUBLIC, "serialization", "theory", "types", "validation"])
def test_public_path_can_be_imported(name):
    assert importlib.import_module(f"specjax.{name}").__name__ == f"specjax.{name}"
