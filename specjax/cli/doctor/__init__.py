"""The command `specjax doctor`: checks this machine, and names faults with their remedies."""

import argparse
import json
import os
from typing import Any

from specjax.cli.doctor.machine import Problem, devices, memory, program_folder, versions
from specjax.validation.extras import extras, install_command

NOT_FOR_USERS = ("docs", "test", "types")  # extras for work on specjax


def add_doctor(commands: Any) -> None:
    """Add the command `specjax doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine: versions, devices, kernels, folders",
        description="Check this machine: versions, extras, devices, memory, the folder of compiled programs, and a "
        "tenth of a second of each operation that has kernels, with its result against a reference. The exit code is 1 "
        "where something is wrong.",
    )
    doctor.set_defaults(run=_doctor, command="doctor", extra="cli")
    doctor.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _doctor(args: argparse.Namespace) -> int:
    """Run `specjax doctor` and return its exit code."""
    # Else JAX takes most of the memory of a GPU, and the figures would show that alone.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems: list[Problem] = []
    report: dict[str, Any] = {"versions": versions(problems), "extras": _extras()}
    _say(args, _versions_text(report))
    report["devices"] = devices(problems)
    report["memory"] = memory(problems)
    report["programs"] = program_folder(problems)
    _say(args, _machine_text(report))
    report["operations"] = _operations(args, problems) if report["devices"] else []
    report["problems"] = [problem._asdict() for problem in problems]
    if args.json:
        print(json.dumps(report))
    else:
        print(_problems_text(problems))
    return 1 if problems else 0


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, flush=True)


def _extras() -> dict[str, str | None]:
    """Return for each extra the command that installs it, None where it is installed."""
    return {
        name: install_command(name, missing[0]) if missing else None
        for name, missing in extras().items()
        if name not in NOT_FOR_USERS
    }


def _versions_text(report: dict[str, Any]) -> str:
    installed = [name for name, command in report["extras"].items() if command is None]
    lines = [
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"extras that are installed: {', '.join(installed) or 'none'}",
    ]
    lines += [f"extra {name}: {command}" for name, command in report["extras"].items() if command is not None]
    return "\n".join(lines)


def _machine_text(report: dict[str, Any]) -> str:
    lines = [
        f"device {device['id']}: {device['kind']} ({device['platform']}"
        + "".join(f", {name.replace('_', ' ')} {value}" for name, value in device.items() if name not in NAMED)
        + ")"
        for device in report["devices"]
    ]
    lines += [
        f"memory of {name}: {_size(free)} free of {_size(total)}" for name, (free, total) in report["memory"].items()
    ]
    folder = report["programs"]
    if folder["folder"] is None:
        return "\n".join([*lines, "compiled programs: not kept"])
    can = "can be written" if folder["is_writable"] else "cannot be written"
    about = f"{folder['files']} files, {_size(folder['bytes'])}, {can}, {_size(folder['free_bytes'])} free on its disk"
    return "\n".join([*lines, f"compiled programs: {folder['folder']}, {about}"])


NAMED = ("id", "kind", "platform")  # fields of a device that have their place in its line


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _operations(args: argparse.Namespace, problems: list[Problem]) -> list[dict[str, Any]]:
    """Run each probe, say its figures as they come, and note those whose result is wrong."""
    from specjax.cli.doctor.probes import measure, probes

    rows = []
    for probe in probes():
        row = measure(probe)
        rows.append(row)
        how = row["path"] + (f", because {row['reason']}" if row["reason"] else "")
        result = "equals the reference" if row["error"] is None else row["error"]
        speed = "" if row["microseconds"] is None else f"{row['microseconds']:,.0f} us, "
        _say(args, f"{row['operation']}: {speed}{how}; the result {result}")
        if row["error"] is not None:
            remedy = "give implementation='xla' where you call it, and report this output with your versions"
            if row["path"] == "XLA":
                remedy = "reinstall jax and jaxlib in a new environment, and report this output if it stays"
            problems.append(Problem(f"{row['operation']} by {row['path']}: the result {row['error']}", remedy))
    return rows


def _problems_text(problems: list[Problem]) -> str:
    if not problems:
        return "nothing is wrong"
    lines = [f"{i}. {problem.cause}; {problem.remedy}" for i, problem in enumerate(problems, 1)]
    return "\n".join(["something is wrong:", *lines])
