"""The command `specjax tune`: measures the steps of a model and its drafter, and says which K pays at which rate."""

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.cli.models import add_model_arguments, load
from specjax.version import __version__

if TYPE_CHECKING:
    from specjax.engine.llm import LLM
    from specjax.types import Proposer

RATES = (0.5, 0.6, 0.7, 0.8, 0.9)  # acceptance rates for which the best K is told
SHORT, LONG, REPEATS = 2, 12, 5  # steps of the calls whose difference is measured, and calls of each

logger = logging.getLogger(__name__)


def add_tune(commands: Any) -> None:
    """Add the command `specjax tune`."""
    tune = commands.add_parser(
        "tune",
        help="measure how long steps take, and find the best number of draft tokens",
        description="Measure the seconds of a step by the number of sequences and of draft tokens K, write them to a "
        "file that theory.StepTimes.load reads, and print the best K for several acceptance rates.",
    )
    tune.set_defaults(run=_tune, command="tune", extra="cli")
    add_model_arguments(tune)
    add = tune.add_argument
    add("--num-draft-tokens", type=int, default=8, metavar="K", help="largest number of draft tokens; default: 8")
    add("--batches", type=int, nargs="+", default=[1, 4], metavar="B", help="numbers of sequences; default: 1 4")
    add("--context", type=int, default=256, metavar="N", help="tokens of each sequence before a step; default: 256")
    add("--out", type=Path, required=True, metavar="FILE", help="file for the seconds, JSON")


def _tune(args: argparse.Namespace) -> int:
    """Run `specjax tune` and return its exit code."""
    from specjax.engine.draft_length import choices, with_draft_lengths
    from specjax.theory import StepTimes

    for name, values in (("batches", args.batches), ("context", [args.context])):
        if min(values) < 1:
            raise ValueError(f"--{name} must be at least 1, got {min(values)}")
    llm = load(args)
    if not hasattr(llm.proposer, "with_num_draft_tokens"):
        raise ValueError(f"--draft must be able to make other numbers of drafts, got {type(llm.proposer).__name__}")
    lengths = sorted(choices(llm.proposer))
    proposers = with_draft_lengths(llm.proposer, lengths)
    print(f"milliseconds of a step, context {args.context}\n\n| B | {' | '.join(f'K = {k}' for k in lengths)} |")
    print("|---" * (len(lengths) + 1) + "|")
    measured: dict[int, dict[int, float]] = {}
    for batch in args.batches:
        measured[batch] = {k: step_seconds(llm, proposers[k], batch, args.context) for k in lengths}
        print(f"| {batch} | {' | '.join(f'{1e3 * measured[batch][k]:.2f}' for k in lengths)} |", flush=True)
    times = StepTimes(measured)
    about = {"model": args.model, "draft": args.draft, "device": jax.devices()[0].device_kind, "context": args.context}
    times.save(args.out, **about, specjax=__version__, jax=jax.__version__)
    print(f"\nbest K by acceptance rate\n\n| B | {' | '.join(map(str, RATES))} |\n{'|---' * (len(RATES) + 1)}|")
    for batch in args.batches:
        print(f"| {batch} | {' | '.join(str(times.best(batch, rate)) for rate in RATES)} |")
    return 0


def step_seconds(llm: "LLM", proposer: "Proposer", batch: int, context: int) -> float:
    """Return the seconds of a step of `batch` sequences with a proposer.

    Args:
        llm: the target and the verifier.
        proposer: the proposer.
        batch: number of sequences.
        context: tokens of each sequence before the first step.

    Raises:
        ValueError: the sequences become longer than the model takes.
    """
    from specjax import SamplingParams, decode, sampling

    num_steps = (REPEATS + 1) * (SHORT + LONG)
    size = context + (proposer.num_draft_tokens + 1) * num_steps
    if size > llm.max_length:
        raise ValueError(f"--context must be at most {llm.max_length - size + context}, got {context}")
    tokens = np.random.default_rng(0).integers(0, llm.model.vocab_size, (batch, context), np.int32)
    rows = sampling.batch([SamplingParams(temperature=1.0, max_tokens=size)] * batch)
    lengths, key = np.full(batch, context, np.int32), jax.random.key(0)
    prefill = jax.jit(decode.prefill, static_argnames="max_length")
    state = prefill(llm.model, proposer, tokens, lengths, rows, key, max_length=size)

    def steps(count: int) -> None:
        nonlocal state
        state = decode.generate(llm.model, proposer, state, verifier=llm.verifier, max_steps=count)
        jax.block_until_ready(state)

    return slope(steps)


def slope(steps: Callable[[int], None]) -> float:
    """Return the seconds that one more step adds to `steps(count)`, by the fastest of short and of long calls.

    The fastest call is the one that other programs on the machine disturbed least.
    """
    fastest = []
    for count in (SHORT, LONG):
        times = []
        for _ in range(REPEATS + 1):  # the first one compiles
            start = time.perf_counter()
            steps(count)
            times.append(time.perf_counter() - start)
        fastest.append(min(times[1:]))
    return max(fastest[1] - fastest[0], 1e-9) / (LONG - SHORT)
