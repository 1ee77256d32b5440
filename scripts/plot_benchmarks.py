"""Draw the plots of docs/benchmarks.md from the JSON of the benches.

    python scripts/plot_benchmarks.py
    python scripts/bench_decode.py --preset 8b-eagle3 --json docs/plots/decode-8b-eagle3.json

Files of `bench_decode.py` give the speed-up by batch and K, the time of a step by its rows, and specjax beside other
systems (`peers.py`); files of `bench_embedded.py` give the acceptance by position. Random weights accept nothing: a
speed-up is the expected number of tokens at an acceptance rate over the time of a step.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
RATE = 0.7  # acceptance rate of the speed-ups
GREY = "#8C8C8C"

Report = dict[str, Any]


def of_rate(row: dict[str, Any], rate: float) -> float:
    """Return the tokens/s of a row at an acceptance rate; plain decoding has one speed."""
    speeds = {float(key): value for key, value in row["tokens_per_s"].items()}
    return speeds.get(rate, speeds[1.0])


def draw_speed_up(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw a bar for each drafter, batch and K: the speed at RATE over plain decoding of the same batch."""
    bars = []
    for number, report in enumerate(reports):
        plain = {row["batch"]: of_rate(row, RATE) for row in report["rows"] if not row["num_drafts"]}
        for row in report["rows"]:
            if row["num_drafts"] and row["batch"] in plain:
                label = f"{report.get('drafter', report['preset'])}, B = {row['batch']}, K = {row['num_drafts']}"
                bars.append((label, of_rate(row, RATE) / plain[row["batch"]], f"C{number}"))
    labels, values, colors = zip(*bars, strict=True)
    drawn = axes.barh(labels, values, color=colors, height=0.7)
    axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel=f"speed over plain decoding, acceptance rate {RATE}", xlim=(0, 1.12 * max(values)))


def draw_steps(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw the time of a step against its rows, B (K + 1): a line for each drafter and batch, plain decoding first."""
    for number, report in enumerate(reports):
        label = report.get("drafter", report["preset"])
        for batch in sorted({row["batch"] for row in report["rows"]}):
            rows = sorted((row["num_drafts"], 1e3 * row["step_s"]) for row in report["rows"] if row["batch"] == batch)
            counts, times = [batch * (k + 1) for k, _ in rows], [milliseconds for _, milliseconds in rows]
            axes.plot(counts, times, "o-", color=f"C{number}", label=label)
            about = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"B = {batch}", (counts[-1], times[-1]), (0, 7), **about)
            label = None
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows of a step, B (K + 1)", ylabel="milliseconds of a step", ylim=(0, None), xlim=(0.8, 512))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(frameon=False, loc="upper left")


def draw_peers(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw groups of bars: the time of a step of specjax and of other systems at the same work, specjax's as 1."""
    place, places, labels = 0.0, [], []
    for report in reports:
        for row in report["rows"]:
            others = peers.of_decoding(report["preset"], row["batch"], row["num_drafts"])
            if not others:
                continue
            own = 1e3 * row["step_s"]
            steps = [("specjax", own, "C0"), *((peer.name, peer.step_ms, GREY) for peer in others)]
            drafts = f"K = {row['num_drafts']}" if row["num_drafts"] else "plain"
            for name, milliseconds, color in steps:
                drawn = axes.barh([place], [milliseconds / own], color=color, height=0.8)
                axes.bar_label(drawn, [f"{milliseconds:.2f} ms"], padding=3, fontsize=8)
                places.append(place)
                labels.append(f"{report['preset']}, B = {row['batch']}, {drafts}: {re.split('[;,]', name)[0]}")
                place += 1
            place += 0.6
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="time of a step against specjax; other systems were measured in other runs", xlim=(0, 9))


def draw_acceptance(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw the acceptance rate at each position of a draft, for each drafter and temperature, on text of one kind."""
    draw_rates(axes, [row for report in reports for row in report["rows"] if "kind" not in row])


def draw_kinds(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw the acceptance rate at each position of a draft, over all kinds of text, by the verifier `rejection`."""
    rows = [row for report in reports for row in report["rows"] if row.get("kind") == "all"]
    draw_rates(axes, [row for row in rows if row["verifier"] == "rejection" and row["temperature"] < 1])


def draw_rates(axes: Axes, rows: Sequence[dict]) -> None:
    """Draw a line for each row."""
    drafters: dict[str, str] = {}
    for row in rows:
        color = drafters.setdefault(row["drafter"], f"C{len(drafters)}")
        style = "o-" if row["temperature"] == 0 else "o--"
        positions = range(1, len(row["by_position"]) + 1)
        label = f"{row['drafter']}, temperature {row['temperature']:g}"
        axes.plot(positions, row["by_position"], style, color=color, label=label)
        axes.set_xticks(list(positions))
    axes.set(xlabel="position of the draft token", ylabel="acceptance rate, with all before", ylim=(0, 1))
    axes.legend(frameon=False)


PLOTS: dict[str, tuple[Callable[[Axes, Sequence[Report]], None], str, tuple[float, float]]] = {
    "speed-up": (draw_speed_up, "step_s", (7.5, 3.4)),
    "steps": (draw_steps, "step_s", (7.5, 4.2)),
    "peers": (draw_peers, "step_s", (8.5, 5.5)),
    "acceptance": (draw_acceptance, "by_position", (6.5, 3.8)),
    "acceptance-smollm2": (draw_kinds, "kind", (6.5, 3.8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="JSON of benches; default: all in docs/plots")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the plots; default: docs/plots")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in args.files or sorted(FOLDER.glob("*.json"))]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (draw, field, size) in PLOTS.items():
        some = [report for report in reports if any(field in row for row in report["rows"])]
        if not some:
            continue
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes, some)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(args.out / f"{name}.png", dpi=130)
        print(args.out / f"{name}.png", flush=True)


if __name__ == "__main__":
    main()
