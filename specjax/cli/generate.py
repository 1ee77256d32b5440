"""The command `specjax generate`."""

import argparse
import contextlib
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from specjax.cli.models import add_draft_length_arguments, add_model_arguments, load
from specjax.cli.sampling import ONLY_JSON, add_sampling_arguments, sampling_params
from specjax.cli.terminal import LEGEND, console_of_output, summary_of, timed, write, writer
from specjax.engine.requests import Piece
from specjax.sampling import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from specjax.engine.llm import LLM
    from specjax.engine.requests import Completion, Metrics, Result


def add_generate(commands: Any) -> None:
    """Add the command `specjax generate`."""
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text. On a terminal, colours tell accepted drafts from recovered and bonus tokens; "
        "a summary goes to standard error.",
    )
    generate.set_defaults(run=_generate, command="generate", extra="cli")
    add = generate.add_argument
    add("prompt", nargs="?", default="-", metavar="PROMPT", help="text to continue; standard input if omitted or -")
    add_model_arguments(generate)
    add("--chat", action="store_true", help="answer the prompt with the model's chat template")
    add_draft_length_arguments(generate)
    add("--compare", action="store_true", help="also measure plain decoding of the target")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add_sampling_arguments(generate, temperature=0.0, max_tokens=128)


def _generate(args: argparse.Namespace) -> int:
    """Run `specjax generate` and return its exit code."""
    params = _checked_params(args)
    prompt = _read_standard_input() if args.prompt == "-" else args.prompt
    console = None if args.json else console_of_output()
    llm = load(args)
    if args.compare and not llm.proposer.num_draft_tokens:
        raise ValueError("--compare needs drafts: give --draft, and --num-draft-tokens of at least 1")
    request = llm.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
    with timed(console, "compiling") if console and not args.quiet else contextlib.nullcontext():
        # Which of several samples are the best is known at the end alone.
        stream = llm.stream(request, params) if params.num_samples == 1 else None
    show = writer(console) if not args.json else lambda piece: None
    result, compared, exit_code = None, None, 0
    try:
        if stream is None:
            (result,) = llm.generate([request], params)
            for i, completion in enumerate(result.completions):
                show(Piece(f"{'' if i == 0 else chr(10)}[{i + 1}] {completion.text}", -1, "target"))
        else:
            for piece in stream:
                show(piece)
        if args.compare:
            compared = _compare(llm, request, params)
    except KeyboardInterrupt:  # generated text is still reported
        exit_code = 130

    result = result if stream is None else stream.result
    if result is None:
        return exit_code
    if args.json:
        write(_json_report(prompt, result, compared) + "\n")
        return exit_code
    write("\n")
    if not args.quiet:
        _print_summary(console, result.metrics, compared, params.temperature)
    return exit_code


def _checked_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters, of which a text must show all."""
    params = sampling_params(args)
    for name in ONLY_JSON:
        if getattr(params, name) is not None and not args.json:
            raise ValueError(f"--{name.replace('_', '-')} needs --json, as a text does not show it")
    return params


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError("PROMPT must be an argument or come from standard input, got neither")
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {content[error.start]:#04x} at {error.start}"
        raise ValueError(f"PROMPT must be UTF-8 on standard input, got {got}") from error


def _compare(llm: "LLM", prompt: str | list[int], params: SamplingParams) -> dict[str, Any]:
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
    best, *others = map(_completion_report, result.completions)
    report = {"prompt": prompt, **best, "metrics": result.metrics._asdict()}
    if others:
        report["others"] = others
    if result.prompt_logprobs is not None:
        report["prompt_logprobs"] = result.prompt_logprobs
    return json.dumps(_finite(report | ({"compare": compared} if compared else {})))


def _completion_report(completion: "Completion") -> dict[str, Any]:
    report = completion._asdict()
    del report["index"]
    return {name: value for name, value in report.items() if name != "logprobs" or value is not None}


def _print_summary(
    console: "Console | None", metrics: "Metrics", compared: dict[str, Any] | None, temperature: float
) -> None:
    """Print the legend of colours to the console and the figures to standard error."""
    if console and metrics.num_drafted:
        console.print(LEGEND)
    print(summary_of(metrics), file=sys.stderr)
    if compared:
        print(_comparison(compared, temperature), file=sys.stderr)


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
