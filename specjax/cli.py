"""The command `specjax`. What is slow to import is imported once the arguments are known to be right."""

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import specjax

if TYPE_CHECKING:
    from rich.console import Console

    from specjax.engine.llm import LLM
    from specjax.engine.requests import Metrics, Piece
    from specjax.sampling import SamplingParams

STYLES = {"accepted": "green", "recovered": "red", "bonus": "cyan", "target": ""}  # of the kinds of pieces


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; None takes those of the process.

    Returns:
        The exit code: 0, 2 for bad arguments, 130 after an interruption.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly, like other commands, when the reader goes away
    args = _parser().parse_args(argv)
    try:
        return _generate(args)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        message = f'the package {error.name} is missing, install it with: pip install "specjax[cli]"'
    except (ValueError, OSError, NotImplementedError) as error:
        message = str(error)
    print(f"specjax: error: {message}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"specjax: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text. On a terminal, colours tell accepted drafts from recovered and bonus tokens; "
        "a summary goes to standard error.",
    )
    generate.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="standard input if omitted or -")
    generate.add_argument(
        "--model", help="Hugging Face checkpoint of the target, a directory or org/name; default: a built-in pair"
    )
    generate.add_argument("--draft", metavar="MODEL", help="that of the draft, of the same vocabulary, or ngram")
    generate.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights"
    )
    generate.add_argument("--max-length", type=int, metavar="N", help="most tokens of prompt and output")
    generate.add_argument("--chat", action="store_true", help="answer the prompt, by the chat template of the model")
    generate.add_argument(
        "--num-draft-tokens", type=_int_or_auto, default=4, metavar="K", help="0: plain decoding; auto; default: 4"
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy, the default")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability mass to keep")
    generate.add_argument("--top-k", type=int, default=-1, metavar="K", help="number of most likely tokens to keep")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="least relative probability to keep")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens to make; default: 128")
    generate.add_argument("--seed", type=int, metavar="N", help="of the random numbers")
    generate.add_argument("--stop", action="append", metavar="TEXT", help="text to stop before; may be repeated")
    generate.add_argument("--compare", action="store_true", help="measure against plain decoding of the target")
    generate.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    generate.add_argument(
        "--compilation-cache",
        metavar="DIR",
        help="folder for compiled programs; default: in the user's cache directory",
    )
    generate.add_argument(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_const",
        const=False,
        help="compile anew at every start",
    )
    return parser


def _int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _generate(args: argparse.Namespace) -> int:
    from specjax.sampling import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        max_tokens=args.max_tokens,
    )
    prompt = _read_standard_input() if args.prompt == "-" else args.prompt
    console = _console() if sys.stdout.isatty() and not args.json else None

    from specjax.engine.llm import LLM

    llm = LLM(
        args.model,
        args.draft,
        args.num_draft_tokens,
        dtype=args.dtype,
        max_length=args.max_length,
        compilation_cache=args.compilation_cache,
    )
    if args.compare and not llm.proposer.num_draft_tokens:
        raise ValueError("--compare needs drafts: give --draft, and --num-draft-tokens of at least 1")
    request = llm.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
    with console.status("compiling") if console else contextlib.nullcontext():
        stream = llm.stream(request, params)
    write = _writer(console, args.json)
    compared, exit_code = None, 0
    try:
        for piece in stream:
            write(piece)
        if args.compare:
            compared = _compare(llm, request, params)
    except KeyboardInterrupt:
        exit_code = 130

    result = stream.result
    if args.json:
        completion = result.completions[0]._asdict()
        del completion["logprobs"]
        report = {"prompt": prompt, **completion, "metrics": result.metrics._asdict()}
        print(json.dumps(_finite(report | ({"compare": compared} if compared else {}))))
        return exit_code
    print()
    if console and result.metrics.num_drafted:
        console.print(*(f"[{STYLES[kind]}]{kind}[/]" for kind in ("accepted", "recovered", "bonus")))
    print(_summary(result.metrics), file=sys.stderr)
    if compared:
        print(_comparison(compared, params.temperature), file=sys.stderr)
    return exit_code


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
    """What shows a piece as soon as it is made."""
    if is_quiet:
        return lambda piece: None
    if console:
        return lambda piece: console.out(piece.text, style=STYLES[piece.kind], end="", highlight=False)
    return lambda piece: print(piece.text, end="", flush=True)


def _compare(llm: "LLM", prompt: str | list[int], params: "SamplingParams") -> dict[str, Any]:
    """Time the same request with and without drafts, each after a run of its own to warm up."""
    speculative, plain = ([other.generate(prompt, params) for _ in range(2)][1][0] for other in (llm, llm.plain()))
    speed, plain_speed = speculative.metrics.tokens_per_second, plain.metrics.tokens_per_second
    return {
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speed_up": speed / plain_speed if plain_speed else math.nan,
        "texts_agree": speculative.text == plain.text,
    }


def _summary(metrics: "Metrics") -> str:
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
    if compared["texts_agree"]:
        texts = "the texts agree"
    elif temperature == 0:
        texts = "the texts differ"
    else:
        texts = "the texts differ, as sampled ones do: only their law is the same"
    return (
        f"{compared['tokens_per_second']:.1f} tokens/s against {compared['plain_tokens_per_second']:.1f} tokens/s of "
        f"plain decoding: a speed-up of {compared['speed_up']:.2f}; {texts}"
    )


def _finite(value: Any) -> Any:
    """The value with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
