"""The command `specjax completion`: completion of commands, options and values for shells, made from the parser."""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

FILES = {"DIR", "FILE", "MODEL", "REQUESTS", "RESULTS"}  # names of values that are files or directories


class Option(NamedTuple):
    """One option of a command, or its arguments without a name where there are no flags."""

    flags: list[str]
    about: str
    choices: list[str]  # possible values; empty where any value is possible
    takes_file: bool
    takes_value: bool


def add_completion(commands: Any) -> None:
    """Add the command `specjax completion`."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description="Print a script that completes commands, options and values: source <(specjax completion bash), "
        "source <(specjax completion zsh), or specjax completion fish | source.",
    )
    completion.set_defaults(run=lambda args: _completion(args, commands), command="completion", extra="cli")
    completion.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=", ".join(SCRIPTS))


def _completion(args: argparse.Namespace, commands: Any) -> int:
    """Run `specjax completion` and return its exit code."""
    about = {action.dest: action.help or "" for action in commands._choices_actions}
    options = {name: _options(command) for name, command in commands.choices.items()}
    print(SCRIPTS[args.shell](about, options), end="")
    return 0


def _options(command: argparse.ArgumentParser) -> list[Option]:
    """Return the options and arguments of a command."""
    return [
        Option(
            list(action.option_strings),
            (action.help or "").replace("%%", "%"),
            [str(choice) for choice in action.choices or ()],
            action.metavar in FILES or action.dest == "model",
            action.nargs != 0,
        )
        for action in command._actions
    ]


def _bash(about: Mapping[str, str], options: Mapping[str, list[Option]]) -> str:
    """Return the script for bash, which zsh runs too by its bashcompinit."""
    values, words = [], []
    for name, given in options.items():
        flags = " ".join(flag for option in given for flag in option.flags)
        words.append(f"        {name}) words={shlex.quote(flags)} ;;")
        for option in given:
            if option.takes_value and option.flags:
                cases = "|".join(f"{name}:{flag}" for flag in option.flags)
                action = f"values={shlex.quote(' '.join(option.choices))}" if option.choices else _bash_values(option)
                values.append(f"        {cases}) {action} ;;")
            elif option.choices:
                values.append(f"        {name}:{name}) values={shlex.quote(' '.join(option.choices))} ;;")
    return BASH.format(commands=" ".join(about), words="\n".join(words), values="\n".join(values))


def _bash_values(option: Option) -> str:
    return "files=1" if option.takes_file else "return"


BASH = """\
_specjax() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}}
    local words="" values="" files=""
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    case $command in
{words}
    esac
    case $command:$before in
{values}
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
    elif [[ -n $files || $current != -* ]]; then
        COMPREPLY=($(compgen -f -- "$current"))
    else
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o filenames -F _specjax specjax
"""


def _zsh(about: Mapping[str, str], options: Mapping[str, list[Option]]) -> str:
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{_bash(about, options)}"


def _fish(about: Mapping[str, str], options: Mapping[str, list[Option]]) -> str:
    """Return the script for fish, which shows the help of each option beside it."""
    lines = ["complete -c specjax -f"]
    for name, text in about.items():
        lines.append(f"complete -c specjax -n __fish_use_subcommand -a {name} -d {_fish_quoted(text)}")
    for name, given in options.items():
        for option in given:
            if option.flags or option.choices or option.takes_file:
                lines.append(f"complete -c specjax -n '__fish_seen_subcommand_from {name}' {_fish_option(option)}")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    """Return the arguments of `complete` that describe an option."""
    parts = [f"{'-l' if flag.startswith('--') else '-s'} {flag.lstrip('-')}" for flag in option.flags]
    if option.choices:
        parts.append(f"{'-x ' if option.flags else ''}-a {_fish_quoted(' '.join(option.choices))}")
    elif option.takes_value:
        parts.append("-r -F" if option.takes_file and option.flags else "-F" if option.takes_file else "-x")
    return " ".join([*parts, f"-d {_fish_quoted(option.about)}"])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
