"""The command `specjax tune`: measures the steps of a model and its drafter, and says which K pays at which rate."""

import argparse
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.cli.models import add_model_arguments, load
from specjax.cli.terminal import check_file
from specjax.version import __version__

if TYPE_CHECKING:
    from specjax.engine.llm import LLM
    from specjax.types import Proposer

RATES = (0.5, 0.6, 0.7, 0.8, 0.9)  # acceptance rates for which the best K is told
SHORT, LONG, REPEATS = 2, 12, 5  # steps of the calls whose difference is measured, and calls of each

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Form:
    """Steps that are no chains of some K, and how their tables name them."""

    proposer: "Proposer"
    label: str
    tokens: str  # the tokens that a step must give
    most: str  # how many it gives at most
    most_tokens: int


def add_tune(commands: Any) -> None:
    """Add the command `specjax tune`."""
    tune = commands.add_parser(
        "tune",
        help="measure how long steps take, and find the best number of draft tokens",
        description="Measure the seconds of a step by the number of sequences and of draft tokens K, write them to a "
        "file that theory.StepTimes.load reads, and print the best K for several acceptance rates. With --tree, also "
        "measure steps with trees, and print how many tokens a step must give for a tree to pay; with --drafts-per-row "
        "likewise steps with that budget.",
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
    from specjax.engine.trees import as_trees, check_beside_chains, numbers_of_nodes
    from specjax.theory import StepTimes

    for name, values in (("batches", args.batches), ("context", [args.context])):
        if min(values) < 1:
            raise ValueError(f"--{name} must be at least 1, got {min(values)}")
    check_file("out", args.out)
    nodes, args.tree = numbers_of_nodes(args.tree, is_auto=True), None  # chains are measured with the same models
    llm = load(args)
    if not hasattr(llm.proposer, "with_num_draft_tokens"):
        raise ValueError(f"--draft must be able to make other numbers of drafts, got {type(llm.proposer).__name__}")
    lengths = sorted(choices(llm.proposer))
    proposers = with_draft_lengths(llm.proposer, lengths)
    chains = [k for k in lengths if k <= llm.proposer.num_draft_tokens]
    most, budget = chains[-1], args.drafts_per_row
    if nodes:
        check_beside_chains(nodes[0], most)
    forms = {
        n - 1: _Form(
            as_trees(proposers[most], llm.model, llm.verifier, n),
            f"tree of {n} nodes, K = {most}",
            f"tokens of a step with a tree of {n} nodes",
            f"{most + 1} of the longest path",
            most + 1,
        )
        for n in nodes
    }
    for k in lengths[len(chains) :]:
        label = f"{llm.proposer.num_draft_tokens} drafts, {budget} a row verified"
        about = f"tokens of a row in a step with {label}", f"{budget + 1} that it gives at most"
        forms[k] = _Form(proposers[k], label, *about, budget + 1)
    labels = [f"K = {k}" for k in chains] + [form.label for form in forms.values()]
    for each in (*proposers.values(), *(form.proposer for form in forms.values())):
        check_room(llm, each, args.context)
    print(f"milliseconds of a step, context {args.context}\n\n| B | {' | '.join(labels)} |")
    print("|---" * (len(labels) + 1) + "|")
    measured: dict[int, dict[int, float]] = {}
    of_forms: dict[int, dict[int, float]] = {}
    for batch in args.batches:
        measured[batch] = {k: step_seconds(llm, proposers[k], batch, args.context) for k in chains}
        of_forms[batch] = {k: step_seconds(llm, form.proposer, batch, args.context) for k, form in forms.items()}
        row = [*measured[batch].values(), *of_forms[batch].values()]
        print(f"| {batch} | {' | '.join(f'{1e3 * seconds:.2f}' for seconds in row)} |", flush=True)
    times = StepTimes(measured)
    about = {"model": args.model, "draft": args.draft, "device": jax.devices()[0].device_kind, "context": args.context}
    of_all = {b: seconds | of_forms[b] for b, seconds in measured.items()}
    StepTimes(of_all).save(args.out, **about, specjax=__version__, jax=jax.__version__)
    best = {batch: [str(times.best(batch, rate)) for rate in RATES] for batch in args.batches}
    _print_by_rate("best K by acceptance rate", best)
    for k, form in forms.items():
        needed = {b: [needed_tokens(times.at(b), of_forms[b][k], rate) for rate in RATES] for b in args.batches}
        _print_by_rate(
            f"{form.tokens} that is as fast as the best chain, by the chain's acceptance rate; a dash is more than the "
            f"{form.most}",
            {b: [f"{x:.2f}" if x <= form.most_tokens else "-" for x in tokens] for b, tokens in needed.items()},
        )
    return 0


def _print_by_rate(title: str, rows: Mapping[int, Sequence[str]]) -> None:
    """Print a table of a cell for each acceptance rate, by the number of sequences."""
    print(f"\n{title}\n\n| B | {' | '.join(map(str, RATES))} |\n{'|---' * (len(RATES) + 1)}|")
    for batch, cells in rows.items():
        print(f"| {batch} | {' | '.join(cells)} |")


def needed_tokens(chains: Mapping[int, float], seconds: float, acceptance_rate: float) -> float:
    """Return the tokens that a step of another form must give a row to be as fast as the best chain.

    Args:
        chains: the seconds of a step with each K.
        seconds: the seconds of a step of the other form.
        acceptance_rate: the rate at which the drafts of chains are accepted.
    """
    from specjax.theory import expected_tokens

    return max(float(expected_tokens(acceptance_rate, k)) / of_chain for k, of_chain in chains.items()) * seconds


def check_room(llm: "LLM", proposer: "Proposer", context: int) -> int:
    """Return the tokens of a sequence that is measured; raise ValueError where these are more than the model takes."""
    from specjax.decoding.drafters import num_fed

    k, num_steps = proposer.num_draft_tokens, (REPEATS + 1) * (SHORT + LONG)
    needed = (k + 1) * (num_steps - 1) + num_fed(proposer)
    if needed >= llm.max_length:
        raise ValueError(
            f"--num-draft-tokens must be less than {k} for a model of {llm.max_length} tokens, as the steps that are "
            f"measured need {needed}"
        )
    if context + needed > llm.max_length:
        raise ValueError(f"--context must be at most {llm.max_length - needed}, got {context}")
    return context + needed


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

    size = check_room(llm, proposer, context)
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
