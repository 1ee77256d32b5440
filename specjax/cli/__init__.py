"""The command `specjax`. Modules that import slowly are imported after the arguments have been checked."""

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from specjax.cli.batch import add_batch
from specjax.cli.bench import add_bench
from specjax.cli.chat import add_chat
from specjax.cli.completion import add_completion
from specjax.cli.doctor import add_doctor
from specjax.cli.generate import add_generate
from specjax.cli.models import load_llm
from specjax.cli.quantize import add_quantize
from specjax.cli.serve import add_serve
from specjax.cli.terminal import shown
from specjax.cli.train import add_train
from specjax.cli.tune import add_tune
from specjax.validation import suggestion
from specjax.validation.extras import needs
from specjax.version import __version__

if TYPE_CHECKING:
    from specjax.processes.follower import Follower

SAME = (  # arguments that must be the same in all processes
    "model",
    "draft",
    "num_draft_tokens",
    "step_times",
    "tree",
    "drafts_per_row",
    "verifier",
    "dtype",
    "quantization",
    "draft_quantization",
    "cache_dtype",
    "max_length",
    "tensor_parallel",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; without arguments, print its help.

    Args:
        argv: arguments of the command; None takes the arguments of the process.

    Returns:
        The exit code: 0 for success, 2 for bad arguments, 130 after an interruption, 141 where the reader of its output
        stops, as `head` does.
    """
    _open_missing_files()
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        with _interruptible(), needs(args.extra), shown(_level(args)):
            exit_code = _run(args)
            sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except (ModuleNotFoundError, ValueError, OSError, NotImplementedError, MemoryError) as error:
        message = str(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        remedy = "lower --max-length or --num-slots, or give --dtype bfloat16 or more devices with --tensor-parallel"
        message = f"the memory of the device is full; {remedy}: {str(error).splitlines()[0]}"
    print(f"specjax: error: {message}", file=sys.stderr)
    return 2


def _level(args: argparse.Namespace) -> int:
    """Return the level of the log that a command shows; without -v a text is logged on a terminal alone."""
    if args.quiet or args.verbose:
        return logging.WARNING if args.quiet else logging.DEBUG
    is_text = args.command in ("generate", "chat")
    is_told = not is_text or (sys.stderr.isatty() and not getattr(args, "json", False))
    return logging.INFO if is_told else logging.WARNING


def _open_missing_files() -> None:
    """Put nothing in the place of standard files that whoever started the process has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Repeat an interruption that is lost because it comes while Python calls JAX as it collects garbage."""
    before = sys.unraisablehook

    def interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(dropped)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _discard_output() -> None:
    """Let Python write the rest of the output to nowhere, else it complains when it ends.

    The signal SIGPIPE, which ends other commands here, stays ignored: it would also end this process without a message
    where a client of the server, a process that compiles grammars or another process of the job has gone.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in (sys.stdout, sys.stderr):
        os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def _run(args: argparse.Namespace) -> int:
    """Run a command, as one of several processes where the arguments say so."""
    if args.coordinator is None:
        for name in ("num_processes", "process_id"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --coordinator, the address of process 0")
        return args.run(args)
    from specjax.processes import join
    from specjax.processes.follower import Follower

    numbers = args.num_processes, args.process_id
    compared = {"the command": args.command} | {
        f"--{name.replace('_', '-')}": getattr(args, name) for name in SAME if hasattr(args, name)
    }
    with join(args.coordinator, *numbers, arguments=compared, timeout=args.join_timeout) as group:
        exit_code = _follow(args, group) if isinstance(group, Follower) else args.run(args)
        if exit_code:
            group.fail(f"exit code {exit_code}")
        return exit_code


def _follow(args: argparse.Namespace, group: "Follower") -> int:
    """Load the models, and repeat the calls of process 0."""
    llm = load_llm(args)
    group.follow(llm.model, llm.proposer, llm.verifier)
    return 0


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage, and whose options have no abbreviations."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, allow_abbrev=False)  # "--prompt" would be "--prompt-logprobs"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; an option that is unknown is an error, which may name one that is known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            begun = [option for option in known if option.startswith(unknown[0]) or option == unknown[0][:-1]]
            hint = f"; did you mean {begun[0]!r}?" if len(begun) == 1 else suggestion(unknown[0], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str):
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = suggestion(choice[1], re.findall(r"[\w.-]+", choice[2])) if choice else ""
        self.exit(2, f"specjax: error: {message}{hint}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    parser.set_defaults(command=None, coordinator=None, num_processes=None, process_id=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for add in (
        add_generate,
        add_chat,
        add_batch,
        add_serve,
        add_bench,
        add_train,
        add_tune,
        add_quantize,
        add_doctor,
        add_completion,
    ):
        add(commands)
    for command in commands.choices.values():
        told = command.add_mutually_exclusive_group()
        told.add_argument("-q", "--quiet", action="store_true", help="show warnings and errors alone")
        told.add_argument("-v", "--verbose", action="store_true", help="show all of the log, also of details")
    return parser
