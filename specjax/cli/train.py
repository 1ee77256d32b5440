"""The command `specjax train`: trains a drafter on the features of a target."""

import argparse
import csv
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.terminal import Steps

if TYPE_CHECKING:
    from specjax.models.directory import Checkpoint
    from specjax.training.corpus import Corpus
    from specjax.training.data import Acceptance, Document
    from specjax.training.drafter import Kind, Plan
    from specjax.training.loop import Progress
    from specjax.types import PyTree

KINDS = "dflash", "dspark", "eagle3", "medusa", "p_eagle"
LOSSES = "forward_kl", "lk_hybrid", "negative_log_acceptance", "text_and_variation", "total_variation"
OPTIMIZERS = "adam", "muon"
NOT_OF_THE_RUN = ("out", "run", "command", "extra", "quiet", "verbose", "save_every")  # whose values may change
NOT_OF_THE_RUN += ("coordinator", "num_processes", "process_id")
OF_CORPUS = ("data", "target", "dtype", "length", "num_prompts", "regenerate", "seed")  # which its tokens depend on
CORPUS = "data.npz"  # in the state of a run, its tokens for training and measuring
STEPS = "steps"  # in the state of a run, its checkpoints

logger = logging.getLogger(__name__)


def add_train(commands: Any) -> None:
    """Add the command `specjax train`."""
    train = commands.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter on the features of a target: a head of EAGLE-3 or P-EAGLE, DFlash, DSpark or "
        "Medusa heads. A twentieth of the documents, at least one, is held out to measure the acceptance on. "
        "--out becomes a directory that --draft takes, with a card (README.md) and the figures of each step (log.csv). "
        "Ctrl-C saves; the same command then goes on.",
    )
    train.set_defaults(run=_train, command="train", extra="train")
    add = train.add_argument
    add("--target", metavar="MODEL", help="checkpoint of the target, a directory or a name; default: the embedded one")
    add("--kind", choices=KINDS, default="eagle3", help="default: eagle3")
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help="files or directories of text, or .npz")
    add("--out", type=Path, required=True, metavar="DIR", help="directory for the drafter")
    add("--init", type=Path, metavar="DIR", help="drafter of the same kind to begin with; default: a new one")
    add("--layout", help="layout of the files, as training.save_pretrained takes it")
    add("--num-draft-tokens", type=int, default=4, metavar="K", help="steps, heads or drafts of a block; default: 4")
    add("--vocab-size", type=int, metavar="N", help="tokens of the draft vocabulary; default: all")
    add("--layers", type=int, metavar="N", help="layers of the drafter; default: 1 for eagle3, 2 for others")
    add("--mlp-size", type=int, metavar="N", help="width of the drafter's MLP; default: the target's")
    add("--mask-token", type=int, metavar="ID", help="mask token of dflash, dspark, p_eagle; default: the rarest token")
    add(
        "--regenerate",
        type=int,
        default=0,
        metavar="N",
        help="continuations by the target to train on, too; default: 0",
    )
    add("--loss", choices=LOSSES, help="default: text_and_variation for dspark, lk_hybrid for others")
    length = train.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=400, metavar="N", help="default: 400")
    length.add_argument("--minutes", type=float, metavar="X", help="time to train, in place of steps")
    add("--batch", type=int, default=8, metavar="N", help="rows of a step; default: 8")
    add("--length", type=int, default=256, metavar="N", help="tokens of a row; default: 256")
    add("--anchors", type=int, default=32, metavar="N", help="blocks in a row, for dflash and dspark; default: 32")
    add("--rate", type=float, default=3e-3, metavar="X", help="largest learning rate; default: 0.003")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="default: adam")
    add("--every", type=int, default=50, metavar="N", help="steps between measurements of acceptance; default: 50")
    add("--save-every", type=float, default=60.0, metavar="S", help="seconds between checkpoints; default: 60")
    add("--num-prompts", type=int, default=128, metavar="N", help="pieces of held-out text to measure on; default: 128")
    add(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation; default: float32"
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers; default: 0")


def _train(args: argparse.Namespace) -> int:
    """Run `specjax train` and return its exit code."""
    from specjax import models, proposers, training
    from specjax.models.directory import Checkpoint
    from specjax.models.hub import find_checkpoint
    from specjax.training import corpus as text
    from specjax.training import drafter

    check_arguments(args)
    directory = models.EMBEDDED / "target" if args.target is None else find_checkpoint("target", args.target)
    checkpoint = Checkpoint(directory, keep_codes=False)
    target = models.load(checkpoint, dtype=args.dtype)
    target = models.with_feature_layers(target, drafter.layers_of(target.apply.config.num_layers, args.kind))
    corpus = _corpus(args, checkpoint, target.vocab_size)
    vocab, first = None, None
    if args.init is not None:
        first = proposers.load(args.init, target, num_draft_tokens=args.num_draft_tokens)
        vocab = drafter.vocabulary_of(first, target.vocab_size)
    elif args.vocab_size is not None:
        vocab = training.vocabulary(corpus.counts, args.vocab_size)
    if vocab is not None:
        share = corpus.counts[vocab.ids].sum() / corpus.counts.sum()
        logger.info("the draft vocabulary holds %.2f %% of the tokens", 100 * share)
    kind, params, frozen = drafter.new_drafter(
        args.kind,
        target,
        args.num_draft_tokens,
        args.anchors,
        int(np.argmin(corpus.counts)) if args.mask_token is None else args.mask_token,
        vocab,
        jax.random.key(args.seed),
        num_layers=args.layers,
        mlp_size=args.mlp_size,
    )
    if first is not None:
        kind, params = drafter.begin_with(first, kind, params)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    sizes = len(corpus.rows.tokens), args.length, len(corpus.prompts), num_params
    logger.info("%d rows of %d tokens, %d pieces of held-out text; %s parameters to train", *sizes)
    steps = args.steps if args.minutes is None else None
    loss = args.loss or ("text_and_variation" if args.kind == "dspark" else "lk_hybrid")
    options = args.rate, args.seed, loss, args.every, jnp.dtype(args.dtype), args.optimizer
    plan = drafter.Plan(steps, args.minutes, *options)
    data = drafter.Data(corpus.rows, args.batch, args.seed)
    eos = checkpoint.eos_token_ids(target.vocab_size)

    def acceptance(params: "PyTree") -> "dict[float, Acceptance]":
        whole = jax.tree.map(lambda x: x.astype(args.dtype), jax.device_get(params | frozen))
        proposer = kind.proposer(whole)
        return text.measure(target, proposer, corpus.prompts, max_steps=1, eos_token_ids=eos)

    with _Log(args.out / "log.csv", kind, plan, data.num_tokens, acceptance) as log, _asked_to_stop() as asked:
        params = drafter.train(
            kind,
            params,
            frozen,
            target,
            data,
            plan,
            log.report,
            on_step=log.on_step,
            should_stop=lambda: bool(asked),
            checkpoint=args.out / "state" / STEPS,
            seconds_per_save=args.save_every,
        )
    if asked:
        print(f"specjax: saved at step {log.step}; the same command goes on from there", file=sys.stderr)
        return 130
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.device_get(params | frozen))
    name = "the embedded target" if args.target is None else args.target
    trained = kind.proposer(half)
    training.save_pretrained(trained, args.out, target=target, layout=args.layout, target_name=name)
    loaded = proposers.load(args.out, target, num_draft_tokens=args.num_draft_tokens)
    found = text.measure(target, loaded, corpus.prompts, eos_token_ids=eos)
    _write_card(args, name, log, num_params, len(corpus.prompts), loss, found)
    lengths = ", ".join(f"{each.tokens_per_step:.2f} at {temperature}" for temperature, each in found.items())
    print(f"{args.out}: mean acceptance length on the target's own text by temperature: {lengths}")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Keep the arguments in `--out`, and raise ValueError where a run that made its data there had others.

    Before the first checkpoint the arguments that the data do not depend on may change, as where one was wrong.
    """
    from specjax.training.export import LAYOUTS

    if args.vocab_size is not None and args.kind == "medusa":
        raise ValueError("--vocab-size must be absent for medusa, whose heads have the target's vocabulary")
    if args.init is not None and args.vocab_size is not None:
        raise ValueError("--vocab-size must be absent with --init, whose drafter has its vocabulary")
    layouts = LAYOUTS[args.kind]
    if args.layout not in (None, *layouts):
        raise ValueError(f"--layout must be {' or '.join(layouts)} for {args.kind}, got {args.layout}")
    if args.mask_token is not None and args.kind in ("eagle3", "medusa"):
        raise ValueError(f"--mask-token must be absent for {args.kind}, which has no mask token")
    path, data = (args.out / "state" / name for name in ("arguments.json", CORPUS))
    given = {name: str(value) for name, value in vars(args).items() if name not in NOT_OF_THE_RUN}
    if path.is_file() and data.is_file():
        before = json.loads(path.read_text())
        has_steps = any((args.out / "state" / STEPS).glob("[0-9]*"))
        names = given.keys() | before.keys() if has_steps else OF_CORPUS
        changed = sorted(name for name in names if given.get(name) != before.get(name))
        if changed:
            raise ValueError(
                f"--out must be a new directory or have a run of the same arguments, got {args.out}, where these "
                f"differ: {', '.join(f'{name} was {before.get(name)}' for name in changed)}"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(given, indent=1) + "\n")


def _corpus(args: argparse.Namespace, checkpoint: "Checkpoint", vocab_size: int) -> "Corpus":
    """Return the text of the run, or load it from an earlier start."""
    from specjax.training.corpus import continued, load_corpus, make_corpus, save_corpus

    def continuations(texts: list[list[int]]) -> "list[Document]":
        if not args.regenerate:
            return []
        from specjax.engine.llm import LLM

        llm = LLM(checkpoint.directory, dtype=args.dtype, num_draft_tokens=0)
        return continued(llm, texts, args.regenerate, args.seed)

    path = args.out / "state" / CORPUS
    if not path.is_file():
        sizes = {"vocab_size": vocab_size, "length": args.length, "num_prompts": args.num_prompts}
        made = make_corpus(args.data, checkpoint.tokenizer(), continuations=continuations, **sizes)
        save_corpus(path, made)
    return load_corpus(path)


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Give a list that has an item once Ctrl-C has been pressed; the second Ctrl-C interrupts at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(number, before)
        logger.warning("saving after this step; Ctrl-C again ends at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class _Log:
    """Tell of the steps of a run: a row of log.csv for each, and a bar on a terminal or lines elsewhere."""

    def __init__(self, path: Path, kind: "Kind", plan: "Plan", num_tokens: int, acceptance: Any):
        self._path, self._plan, self._num_tokens, self._acceptance = path, plan, num_tokens, acceptance
        rates = [f"acceptance_{i}" for i in range(1, kind.num_draft_tokens + 1)]
        self._columns = ["step", "seconds", "loss", "learning_rate", *rates]
        self.step, self._row, self._shown = 0, {}, Steps() if Steps.is_possible() else nullcontext()

    def __enter__(self) -> "_Log":
        self._bar = self._shown.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._shown.__exit__(*error)

    def on_step(self, now: "Progress") -> None:
        """Write the row of a step, and show it."""
        assert now.losses is not None, "a step has losses"
        loss, rates = now.losses
        figures = [now.step, round(now.seconds, 3), float(loss), self._plan.rate_at(now.share), *map(float, rates)]
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(figures)
        self.step = now.step
        text = f"step {now.step}: loss {float(loss):.4f}, rates {' '.join(f'{rate:.3f}' for rate in rates.tolist())}, "
        text += f"{now.steps_per_second * self._num_tokens:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.show(now.share, text)
        elif now.step == 1 or now.step % self._plan.every == 0 or now.share == 1:
            logger.info("%s (%.0f %%)", text, 100 * now.share)

    def report(self, now: "Progress") -> None:
        """Measure the acceptance after held-out text, and say it; at the start, keep the rows of earlier steps."""
        if now.losses is None:
            self.step = now.step
            self._keep(now.step)
            if now.step:
                logger.info("going on from step %d", now.step)
                return
        found = self._acceptance(now.params)
        lengths = ", ".join(f"{each.tokens_per_step:.2f} at {temperature}" for temperature, each in found.items())
        logger.info("step %d: mean acceptance length after held-out text by temperature: %s", now.step, lengths)

    def _keep(self, step: int) -> None:
        """Begin the file, with the rows up to a step that earlier starts have written."""
        rows: list[list[str]] = []
        if step and self._path.is_file():
            with self._path.open(newline="") as file:
                rows = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= step]
        with self._path.open("w", newline="") as file:
            csv.writer(file).writerows([self._columns, *rows])


def _write_card(
    args: argparse.Namespace,
    target: str,
    log: _Log,
    num_params: int,
    num_prompts: int,
    loss: str,
    found: "Mapping[float, Acceptance]",
) -> None:
    from specjax.training.card import write_card

    write_card(
        args.out,
        target=target,
        kind=args.kind,
        num_draft_tokens=args.num_draft_tokens,
        num_parameters=num_params,
        num_prompts=num_prompts,
        acceptance=found,
        training={
            "steps": log.step,
            "rows of a step": f"{args.batch} of {args.length} tokens",
            "loss": loss,
            "optimiser": args.optimizer,
            "largest learning rate": args.rate,
            "continuations by the target": args.regenerate,
            "seed": args.seed,
        },
    )
