"""Print the requirements of an extra of this project that the running interpreter lacks or has too old.

The exit code is 1 where that is anything. The linter does not count, as no test needs it.
"""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

try:
    import tomllib

    from packaging.requirements import Requirement
except ImportError as error:
    print(error.name)
    sys.exit(1)

LINTER = "ruff"


def requirements(project: dict, extra: str) -> Iterator[Requirement]:
    """The requirements of an extra, and of the extras of this project that it names."""
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name == project["name"]:
            for inner in requirement.extras:
                yield from requirements(project, inner)
        elif requirement.name != LINTER:
            yield requirement


def is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    needed = [*map(Requirement, project["dependencies"]), *requirements(project, sys.argv[1])]
    missing = {str(requirement) for requirement in needed if not is_met(requirement)}
    print(", ".join(sorted(missing)))
    sys.exit(bool(missing))
