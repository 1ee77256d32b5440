"""How results and metrics look: a line for `repr`, and HTML for notebooks."""

import math
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.engine.requests import Metrics, Piece, Result

MOST_CHARACTERS = 40  # of a text in a line
COLOURS = {"accepted": "46,160,67", "recovered": "210,153,34", "bonus": "56,139,253"}  # of kinds of `Piece`, RGB
BAR = "display:inline-block;height:.7em;background:rgb(46,160,67);width:{width:.0f}px"
WIDTH = 120  # pixels of a bar for 1


def shortened(value: object) -> str:
    """Return the `repr` of a text or of token ids, cut in the middle where it is long."""
    text = repr(value)
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]}...{text[-half + 3 :]}"


def line_of_metrics(figures: "Metrics") -> str:
    """Return speed and acceptance in a line."""
    speed = f"{figures.num_tokens} tokens in {figures.seconds:.2f} s, {figures.tokens_per_second:.1f} tokens/s"
    if not figures.num_drafted:
        return f"{speed}, no drafts"
    rates = f"acceptance rate {figures.acceptance_rate:.2f}"
    return f"{speed}, {rates}, mean acceptance length {figures.mean_acceptance_length:.2f}"


def html_of_metrics(figures: "Metrics") -> str:
    """Return speed and acceptance, with a bar for the acceptance rate at each position of a draft."""
    rows = "".join(
        f'<tr><td>draft {i}</td><td style="text-align:left">{_bar(rate)} {rate:.2f}</td></tr>'
        for i, rate in enumerate(figures.acceptance_rate_per_position, 1)
        if not math.isnan(rate)
    )
    return f"<div>{line_of_metrics(figures)}</div><table>{rows}</table>"


def _bar(share: float) -> str:
    return f'<span style="{BAR.format(width=WIDTH * share)}"></span>'


def html_of_result(result: "Result") -> str:
    """Return the text of the best completion with a colour for each kind of token, and the metrics."""
    text = _html_of_pieces(result.pieces) if result.pieces else escape(result.text)
    legend = " ".join(_span(kind, kind, kind) for kind in COLOURS) if result.metrics.num_drafted else ""
    style = "white-space:pre-wrap;overflow-wrap:anywhere"
    return f'<pre style="{style}">{text}</pre><div>{legend}</div>{html_of_metrics(result.metrics)}'


def _html_of_pieces(pieces: "Iterable[Piece]") -> str:
    return "".join(_span(piece.text, piece.kind, f"{piece.kind}, token {piece.token_id}") for piece in pieces)


def _span(text: str, kind: str, title: str) -> str:
    colour = COLOURS.get(kind)
    style = "" if colour is None else f' style="background:rgba({colour},.3)"'
    return f'<span title="{escape(title)}"{style}>{escape(text)}</span>'
