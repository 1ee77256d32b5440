"""Show on a terminal the pieces of a text, in colours, and the library's log: a line a record, and a bar.

The text goes to standard output, and the log to standard error.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from specjax.engine.requests import Metrics, Piece

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "target": ""}  # colour of each kind of `Piece`
LEGEND = " ".join(f"[{style}]{kind}[/]" for kind, style in STYLES.items() if style)


class Lines(logging.Handler):
    """Write each record as a line."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"specjax: {level}{super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # nobody reads it
            self.handleError(record)


class Bar(Lines):
    """Write each record as a line, but records of `specjax.engine.report.Programs` as a bar until all are ready.

    It needs rich, and a terminal.
    """

    def __init__(self):
        super().__init__()
        self._bar: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        num_ready, total = getattr(record, "programs", (0, 0))
        if not total:
            super().emit(record)
            return
        if self._bar is None:
            self._bar = _progress()
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=num_ready, total=total, description=record.getMessage())
        if num_ready == total:
            self.end()

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        self.end()
        super().close()


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    bar = BarColumn(24, complete_style="cyan", finished_style="cyan")
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    return Progress(bar, TimeElapsedColumn(), text, console=Console(stderr=True), transient=True)


@contextmanager
def shown(level: int = logging.INFO) -> Iterator[None]:
    """Show the library's records of a level or above, until the end of the context."""
    logger = logging.getLogger("specjax")
    has_bar = sys.stderr.isatty() and find_spec("rich") is not None
    handler, before = Bar() if has_bar else Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


class Steps:
    """A bar for the steps of a run, with the time that is left. It needs rich, and a terminal on standard error."""

    @staticmethod
    def is_possible() -> bool:
        """Return whether there is a terminal, a log that is shown, and rich."""
        is_shown = logging.getLogger("specjax").isEnabledFor(logging.INFO)
        return is_shown and sys.stderr.isatty() and find_spec("rich") is not None

    def __enter__(self) -> "Steps":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = BarColumn(24), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(*columns, text, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=1.0)
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, share: float, text: str) -> None:
        """Show the share that is done, and a text."""
        self._progress.update(self._task, completed=share, description=text)


def timed(console: "Console", text: str) -> "Progress":
    """Return a context that shows on a console that something goes on, and for how long."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(SpinnerColumn(), TextColumn(text), TimeElapsedColumn(), console=console, transient=True)
    progress.add_task("")
    return progress


def check_file(name: str, path: Path) -> None:
    """Raise ValueError where an option names a file that cannot be written, before the work whose result it gets."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--{name} must be a file in a directory that exists, got {path}")


def console_of_output() -> "Console | None":
    """Return the console of standard output; None where that is no terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console()


def writer(console: "Console | None") -> "Callable[[Piece], None]":
    """Return a function that shows a piece as soon as it is generated, in its colour on a console."""
    if console is None:
        return lambda piece: write(piece.text)
    return lambda piece: console.out(piece.text, style=STYLES[piece.kind], end="", highlight=False)


def write(text: str) -> None:
    """Write to standard output at once; an error names it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def summary_of(metrics: "Metrics") -> str:
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
