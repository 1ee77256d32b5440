"""List the launches of a decoding step on a GPU by their time, and the launches of a layer in their order.

    python scripts/launches.py 8b --quantization fp8
    python scripts/launches.py 8b-eagle3 --batch 64 --num-drafts 3
    python scripts/launches.py qwen3-fp8 gpt-oss-mxfp4
    python scripts/launches.py 35b-a3b --drafter mtp --num-drafts 3

A name is a preset of bench_decode.py, a mixture of bench_experts.py or a hybrid of bench_hybrids.py, all with random
weights. A launch in the list of a layer has the microseconds since the one before ended; where it is less than 0, the
launches overlap.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

LARGEST = 24  # kinds of launches that are listed
STEPS = 4  # in a profile
OF_LAYER = 24  # launches that are listed in their order
GAP = 1e-5  # seconds


@contextmanager
def profiled() -> Iterator[list[Any]]:
    """Profile the device in a block, after which the list holds its launches."""
    events: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0  # they would slow the host down
        with jax.profiler.trace(folder, profiler_options=options):
            yield events
        (path,) = Path(folder).rglob("*.xplane.pb")
        events += of_gpu(jax.profiler.ProfileData.from_file(str(path)))


def of_gpu(profile: Any) -> list[Any]:
    """Return the launches of the first GPU in a profile."""
    return [
        event
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def largest(events: Sequence[Any]) -> list[tuple[str, list[float]]]:
    """Return the names of the launches that take most of the time, with the seconds of each; then all of them."""
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(1e-9 * (event.end_ns - event.start_ns))
    ordered = sorted(by_name.items(), key=lambda each: -sum(each[1]))
    return [*ordered[:LARGEST], ("all", list(itertools.chain(*by_name.values())))]


def in_order(events: Sequence[Any]) -> list[tuple[str, float, float]]:
    """Return the launches from the middle one of attention on: their names, seconds, and seconds since the last end."""
    events = sorted(events, key=lambda event: event.start_ns)
    attends = [i for i, event in enumerate(events) if "attention" in event.name]
    first = attends[len(attends) // 2] if attends else 0
    pairs = itertools.pairwise(events[max(first - 1, 0) : first + OF_LAYER])
    return [
        (event.name, 1e-9 * (event.end_ns - event.start_ns), 1e-9 * (event.start_ns - last.end_ns))
        for last, event in pairs
    ]


def waits_of_device(events: Sequence[Any]) -> dict[str, float]:
    """Return the share of a profile in which the device does nothing, and the share of waits of more than GAP."""
    spans = sorted((event.start_ns, event.end_ns) for event in events)
    waits, until = [], spans[0][1]
    for start, end in spans[1:]:
        if start > until:
            waits.append(1e-9 * (start - until))
        until = max(until, end)
    seconds = 1e-9 * (until - spans[0][0])
    return {"idle": sum(waits) / seconds, "host_gap": sum(wait for wait in waits if wait > GAP) / seconds}


def steps_of(name: str, args: argparse.Namespace) -> Callable[[int], Any]:
    """Return a function that takes a number of decoding steps."""
    import bench_decode
    import bench_experts
    import bench_hybrids

    from specjax import verifiers

    batch, num_drafts = args.batch, args.num_drafts
    if name in bench_hybrids.MODELS:
        config = bench_hybrids.MODELS[name]
        drafter = args.drafter if num_drafts else "plain"
        plain = bench_hybrids.random_model(config)
        target, proposer, _ = bench_hybrids.with_drafter(drafter, config, plain, num_drafts)
        return bench_hybrids.Run(target, proposer, batch, args.context, verifiers.rejection).steps
    if name in bench_experts.MIXTURES:
        config, *formats = bench_experts.MIXTURES[name]
        target, draft = bench_experts.random_model(config, *formats), None
        if num_drafts:
            raise SystemExit(f"--num-drafts must be 0 for the mixture {name}, got {num_drafts}")
    else:
        target, draft = bench_decode.load(name)
        if args.quantization is not None:
            target = bench_decode.quantized(target, args.quantization, with_head=False)
    run = bench_decode.Run(target, draft if num_drafts else None, batch, args.context, num_drafts)
    return partial(run.steps, verifier=verifiers.rejection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-drafts", type=int, default=0)
    parser.add_argument("--drafter", choices=("mtp", "dflash2"), default="mtp", help="of a hybrid")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8", "mxfp4"), help="of a preset's layers")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    for name in args.names:
        steps = steps_of(name, args)
        steps(STEPS)
        with profiled() as events:
            steps(STEPS)
        if not events:
            raise SystemExit("the profile must have launches of a GPU, got none")
        print(f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}, {name}\n")
        print("| kernel | launches a step | us each | us a step |\n" + "|---" * 4 + "|")
        for kernel, spans in largest(events):
            cells = kernel, f"{len(spans) / STEPS:.1f}", f"{1e6 * statistics.mean(spans):.2f}"
            print(f"| {' | '.join(cells)} | {1e6 * sum(spans) / STEPS:.1f} |")
        print("\n| kernel | us | us since the last one |\n" + "|---" * 3 + "|")
        for kernel, seconds, wait in in_order(events):
            print(f"| {kernel} | {1e6 * seconds:.2f} | {1e6 * wait:.2f} |")


if __name__ == "__main__":
    main()
