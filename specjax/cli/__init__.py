"""The command `specjax`. Modules that import slowly are imported after the arguments have been checked."""

import argparse
import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import specjax
from specjax.cli.quantize import add_quantize
from specjax.cli.terminal import shown, timed
from specjax.validation import suggestion
from specjax.validation.extras import needs
from specjax.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from specjax.engine.llm import LLM
    from specjax.engine.requests import Metrics, Piece, Result
    from specjax.processes.follower import Follower
    from specjax.sampling import SamplingParams

SAME = (  # arguments that must be the same in all processes
    "model",
    "draft",
    "num_draft_tokens",
    "verifier",
    "dtype",
    "quantization",
    "draft_quantization",
    "cache_dtype",
    "max_length",
    "tensor_parallel",
)
STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "target": ""}  # colour of each kind of `Piece`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments of the command; None takes the arguments of the process.

    Returns:
        The exit code: 0 for success, 2 for bad arguments, 130 after an interruption, 141 where the reader of its output
        stops, as `head` does.
    """
    _open_missing_files()
    args = _parser().parse_args(argv)
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
    """Return the level of the log that a command shows; `generate` logs on a terminal alone."""
    is_told = args.command != "generate" or (sys.stderr.isatty() and not args.json)
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
    llm = _load_llm(args, **_verifier(args))
    group.follow(llm.model, llm.proposer, llm.verifier)
    return 0


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; an option that is unknown is an error, which may name one that is known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion(unknown[0], known)}")
        return parsed, unknown

    def error(self, message: str):
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = suggestion(choice[1], re.findall(r"[\w.-]+", choice[2])) if choice else ""
        self.exit(2, f"specjax: error: {message}{hint}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text. On a terminal, colours tell accepted drafts from recovered and bonus tokens; "
        "a summary goes to standard error.",
    )
    _add_arguments(generate)
    _add_batch(commands)
    _add_serve(commands)
    add_quantize(commands)
    return parser


def _add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which models run, and how."""
    add = command.add_argument
    add("--model", help="Hugging Face checkpoint of the target, a directory or org/name; default: the embedded family")
    add(
        "--draft",
        metavar="MODEL",
        help="checkpoint of the draft, with the same vocabulary, or of a drafter on the model's features; or ngram; "
        "or self, a copy of the model in few bits",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights; default: that of the checkpoint, or float32 on a CPU",
    )
    add(
        "--quantization",
        choices=("int8", "int4", "fp8"),
        help="round the matrices of the model's layers when they are read; default: keep them as they are stored",
    )
    add("--draft-quantization", choices=("int8", "int4", "fp8"), help="likewise for the checkpoint of --draft")
    add(
        "--cache-dtype",
        choices=("fp8",),
        help="dtype of the keys and values of the model and of a draft model; default: that of the weights",
    )
    add("--max-length", type=int, metavar="N", help="maximum number of tokens, with the prompt")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share the model; default: 1")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, for the same command in several processes")
    add("--num-processes", type=int, metavar="N", help="number of processes; default: that of Slurm or Open MPI")
    add(
        "--process-id", type=int, metavar="I", help="number of this process, from 0; default: that of Slurm or Open MPI"
    )
    add(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds in which all processes must start; default: 300",
    )
    add(
        "--compilation-cache",
        metavar="DIR",
        help="folder for compiled programs; default: in the user's cache directory",
    )
    add(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_const",
        const=False,
        help="compile anew at every start",
    )


def _add_arguments(generate: argparse.ArgumentParser) -> None:
    """Add the arguments of `specjax generate`."""
    generate.set_defaults(run=_generate, command="generate", extra="cli")
    add = generate.add_argument
    add("prompt", nargs="?", default="-", metavar="PROMPT", help="text to continue; standard input if omitted or -")
    _add_model_arguments(generate)
    add("--chat", action="store_true", help="answer the prompt with the model's chat template")
    add(
        "--num-draft-tokens",
        type=_int_or_auto,
        default=4,
        metavar="K",
        help="draft tokens per step, or auto; 0: plain decoding; default: 4",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy, the default")
    add("--top-p", type=float, default=1.0, metavar="P", help="probability mass to keep")
    add("--top-k", type=int, default=-1, metavar="K", help="number of most likely tokens to keep")
    add("--min-p", type=float, default=0.0, metavar="P", help="minimum probability relative to the most likely token")
    add("--max-tokens", type=int, default=128, metavar="N", help="maximum number of generated tokens; default: 128")
    add("--seed", type=int, metavar="N", help="seed of the random numbers")
    add("--stop", action="append", metavar="TEXT", help="text to stop before; may be repeated")
    add("--compare", action="store_true", help="also measure plain decoding of the target")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _add_engine_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the models and their names."""
    _add_model_arguments(command)
    add = command.add_argument
    add(
        "--served-model-name",
        "--name",
        dest="names",
        action="append",
        metavar="NAME",
        help="what requests call the model; may be repeated; default: the name of its directory, or specjax",
    )
    add("--any-model-name", action="store_true", help="let requests call the model by any name")
    add(
        "--num-draft-tokens",
        type=int,
        default=4,
        metavar="K",
        help="draft tokens per step; 0: plain decoding; default: 4",
    )


def _add_serve(commands: Any) -> None:
    """Add the command `specjax serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve clients of OpenAI's protocol, and a page to look at",
        description="Serve a model by HTTP to clients of OpenAI's protocol, and a page that shows how it decodes.",
    )
    serve.set_defaults(run=_serve, command="serve", extra="serve")
    _add_engine_arguments(serve)
    add = serve.add_argument
    add("--verifier", choices=("rejection", "block", "match"), default="rejection", help="default: rejection")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at; default: this machine alone")
    add("--port", type=int, default=8000, metavar="N", help="port to listen at, 0 takes a free one; default: 8000")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that clients must send; may be repeated; default: those in SPECJAX_API_KEY, with spaces between them",
    )
    add("--num-slots", type=int, metavar="N", help="samples that run at a time; default: 16, on CPUs 8")
    add(
        "--step-sizes",
        type=int,
        nargs="*",
        metavar="N",
        help="slots that a step computes where few are active; none: always all; default: 1 8 32, on CPUs 1",
    )
    add("--max-waiting", type=int, default=256, metavar="N", help="requests that may wait for a slot; default: 256")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="seconds of a request; default: 600")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests may take after SIGTERM; default: 30",
    )
    add("--no-access-log", dest="access_log", action="store_false", help="log no requests, only the load")


def _serve(args: argparse.Namespace) -> int:
    """Run `specjax serve` and return its exit code."""
    from specjax.server.run import serve
    from specjax.server.served import name_of

    llm = _load(args, **_verifier(args))
    name, *aliases = args.names or [name_of(args.model)]
    return serve(
        llm,
        name,
        aliases,
        takes_any_name=args.any_model_name,
        host=args.host,
        port=args.port,
        num_slots=args.num_slots,
        step_sizes=args.step_sizes,
        max_waiting=args.max_waiting,
        api_keys=args.api_key or os.environ.get("SPECJAX_API_KEY", "").split(),
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        access_log=args.access_log,
    )


def _int_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or auto, got {text!r}") from None


def _generate(args: argparse.Namespace) -> int:
    """Run `specjax generate` and return its exit code."""
    params = _sampling_params(args)
    prompt = _read_standard_input() if args.prompt == "-" else args.prompt
    console = _console() if sys.stdout.isatty() and not args.json else None
    llm = _load(args)
    if args.compare and not llm.proposer.num_draft_tokens:
        raise ValueError("--compare needs drafts: give --draft, and --num-draft-tokens of at least 1")
    request = llm.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
    with timed(console, "compiling") if console else contextlib.nullcontext():
        stream = llm.stream(request, params)
    write = _writer(console, args.json)
    compared, exit_code = None, 0
    try:
        for piece in stream:
            write(piece)
        if args.compare:
            compared = _compare(llm, request, params)
    except KeyboardInterrupt:  # generated text is still reported
        exit_code = 130

    if args.json:
        _write(_json_report(prompt, stream.result, compared) + "\n")
    else:
        _write("\n")
        _print_summary(console, stream.result.metrics, compared, params.temperature)
    return exit_code


def _sampling_params(args: argparse.Namespace) -> "SamplingParams":
    from specjax.sampling import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        max_tokens=args.max_tokens,
    )


def _load_llm(args: argparse.Namespace, **options: Any) -> "LLM":
    """Load the models that the arguments of `_add_model_arguments` name."""
    from specjax.engine.llm import LLM

    _check_platform()
    names = ("dtype", "max_length", "tensor_parallel", "quantization", "draft_quantization", "cache_dtype")
    options |= {name: getattr(args, name) for name in names}
    return LLM(args.model, args.draft, args.num_draft_tokens, compilation_cache=args.compilation_cache, **options)


def _check_platform() -> None:
    """Raise ValueError where JAX has no device of the platform that the environment asks for."""
    try:
        jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        hint = suggestion(asked, ["cpu", "cuda", "rocm", "tpu"])
        raise ValueError(f"JAX has no device of JAX_PLATFORMS={asked}{hint} ({error})") from error


def _verifier(args: argparse.Namespace) -> dict[str, Any]:
    """Return the verifier, where the command has an argument for it."""
    from specjax import verifiers

    return {"verifier": getattr(verifiers, args.verifier)} if hasattr(args, "verifier") else {}


def _load(args: argparse.Namespace, **options: Any) -> "LLM":
    """Load the models, and say on standard error where a target has no drafter."""
    llm = _load_llm(args, **options)
    if args.model is not None and args.draft is None and args.num_draft_tokens != 0:
        choices = "--draft ngram, a head trained for the model, or a small model of its family"
        print(f"specjax: no --draft is given, so {args.model} decodes plainly; give {choices}", file=sys.stderr)
    return llm


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError("PROMPT must be an argument or come from standard input, got neither")
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {content[error.start]:#04x} at {error.start}"
        raise ValueError(f"PROMPT must be UTF-8 on standard input, got {got}") from error


def _console() -> "Console":
    from rich.console import Console

    return Console()


def _writer(console: "Console | None", is_quiet: bool) -> Callable[["Piece"], Any]:
    """Return a function that shows a piece as soon as it is generated."""
    if is_quiet:
        return lambda piece: None
    if console:
        return lambda piece: console.out(piece.text, style=STYLES[piece.kind], end="", highlight=False)
    return lambda piece: _write(piece.text)


def _write(text: str) -> None:
    """Write to standard output at once; an error names it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def _compare(llm: "LLM", prompt: str | list[int], params: "SamplingParams") -> dict[str, Any]:
    """Time the same request with and without drafts, each after a warm-up run."""
    speculative, plain = ([other.generate([prompt], params) for _ in range(2)][1][0] for other in (llm, llm.plain()))
    speed, plain_speed = speculative.metrics.tokens_per_second, plain.metrics.tokens_per_second
    return {
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speed_up": speed / plain_speed if plain_speed else math.nan,
        "texts_agree": speculative.text == plain.text,
    }


def _json_report(prompt: str, result: "Result", compared: dict[str, Any] | None) -> str:
    completion = result.completions[0]._asdict()
    del completion["logprobs"], completion["index"]
    report = {"prompt": prompt, **completion, "metrics": result.metrics._asdict()}
    return json.dumps(_finite(report | ({"compare": compared} if compared else {})))


def _print_summary(
    console: "Console | None", metrics: "Metrics", compared: dict[str, Any] | None, temperature: float
) -> None:
    """Print the legend of colours to the console and the figures to standard error."""
    if console and metrics.num_drafted:
        console.print(*(f"[{STYLES[kind]}]{kind}[/]" for kind in ("accepted", "recovered", "bonus")))
    print(_summary(metrics), file=sys.stderr)
    if compared:
        print(_comparison(compared, temperature), file=sys.stderr)


def _summary(metrics: "Metrics") -> str:
    """Return one line about speed and acceptance."""
    speed = (
        f"{metrics.num_tokens} tokens in {metrics.seconds:.2f} s: {metrics.tokens_per_second:.1f} tokens/s "
        "(decoding alone, without prompt and compilation)"
    )
    if not metrics.num_drafted:
        return f"{speed}, no drafts"
    return (
        f"{speed}, acceptance rate {metrics.acceptance_rate:.2f}, "
        f"mean acceptance length {metrics.mean_acceptance_length:.2f}"
    )


def _comparison(compared: dict[str, Any], temperature: float) -> str:
    """Return one line about the speed-up over plain decoding."""
    if compared["texts_agree"]:
        texts = "the texts agree"
    elif temperature == 0:
        texts = "the texts differ"
    else:
        texts = "the texts differ, as samples of the same distribution do"
    return (
        f"{compared['tokens_per_second']:.1f} tokens/s against {compared['plain_tokens_per_second']:.1f} tokens/s of "
        f"plain decoding: a speed-up of {compared['speed_up']:.2f}; {texts}"
    )


def _finite(value: Any) -> Any:
    """Replace NaN by None in a value, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _add_batch(commands: Any) -> None:
    """Add the command `specjax batch`."""
    batch = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests in OpenAI's batch format, a line of JSON each. Where the file of "
        "results has some already, the others are answered.",
    )
    batch.set_defaults(run=_batch, command="batch", extra="cli")
    _add_engine_arguments(batch)
    add = batch.add_argument
    add("requests", type=Path, metavar="REQUESTS", help="file of requests, JSON Lines")
    add("--num-slots", type=int, metavar="N", help="samples that run at a time; default: 16")
    add("--out", type=Path, required=True, metavar="RESULTS", help="file of results; it is appended to")


def _batch(args: argparse.Namespace) -> int:
    """Run `specjax batch` and return its exit code."""
    from specjax.engine.sizes import default_sizes
    from specjax.server import batch_files
    from specjax.server.served import name_of, served

    if args.out.exists() and not args.out.is_file():
        raise ValueError(f"--out must be a file, which later runs read again, got {args.out}")
    if args.out.exists() and args.out.samefile(args.requests):
        raise ValueError(f"--out must be another file than that of the requests, got {args.out}")
    batch_files.check_ids(args.requests)  # before models are loaded
    llm = _load(args)
    name, *aliases = args.names or [name_of(args.model)]
    known = served(llm, name, aliases, takes_any_name=args.any_model_name)
    sizes = default_sizes("batch")
    num_slots = sizes.slots if args.num_slots is None else args.num_slots
    with specjax.Engine.of(
        llm,
        num_slots=num_slots,
        capacities=specjax.Capacities(grammars=batch_files.GRAMMARS),
        step_sizes=sizes.step_sizes,
    ) as engine:
        files = args.requests, args.out
        numbers = batch_files.run(engine, known, *files, num_slots=num_slots, progress=True)
    print(
        f"{numbers.answered} answered, {numbers.errors} of them with an error, {numbers.known} before", file=sys.stderr
    )
    return 0
