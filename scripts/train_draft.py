"""Train a drafter on the features of a target: a head of EAGLE-3 or P-EAGLE, DFlash, DSpark or Medusa heads.

    python scripts/train_draft.py --kind eagle3 --data FILES --out DIR
    python scripts/train_draft.py --target CHECKPOINT --kind dspark --data FILES --out DIR --layout speculators

The drafter learns the target's distribution at every token. A twentieth of the documents, at least one, is
held out; on them the script measures the mean acceptance length as it goes. `--out` becomes a directory that
`specjax.LLM(target, draft=DIR)` and `proposers.load` take. A run that was killed goes on where it was when the same
command is given again. As many local devices share a batch as divide it.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import specjax
from specjax import SamplingParams, models, proposers, training
from specjax.models.decoder import DecoderConfig
from specjax.models.directory import Checkpoint
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import dflash, dspark, eagle3, medusa, p_eagle, trunk
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.drawing import reduced_vocabulary
from specjax.proposers.files import target_weights
from specjax.proposers.medusa import head_logits
from specjax.training import losses
from specjax.training.export import LAYOUTS
from specjax.training.loop import Progress, Stage
from specjax.training.unroll import Batch, Steps
from specjax.types import Array, Model, Proposer, PyTree

KINDS = "dflash", "dspark", "eagle3", "medusa", "p_eagle"
LOSSES = {
    "forward_kl": losses.forward_kl,
    "lk_hybrid": losses.lk_hybrid,
    "negative_log_acceptance": losses.negative_log_acceptance,
    "text_and_variation": losses.text_and_variation,
    "total_variation": losses.total_variation,
}
READS_TEXT = ("text_and_variation",)
DECAY = 0.8  # weight of a step in the loss, relative to the step before
NUM_LAYERS = {"eagle3": 1, "p_eagle": 2, "dflash": 2, "dspark": 2}
KEEP = 0.7  # of the tokens after which P-EAGLE learns one draft, the share after which it learns one more
MARKOV_RANK = 64  # numbers by which the token before a draft of DSpark changes its logits
CLIP = 1.0  # largest norm of a gradient
MOST_LOGITS = 2**26  # numbers of a chunk of logits, at which no less than 256 rows are taken at a time
WARM_UP, FINAL = 0.05, 0.05  # share of the run in which rates rise; the last rate as a share of the largest
HELD_OUT = 20  # one document in this number is held out
PROMPT = 64  # tokens of held-out text before a measured step
SAMPLE = 192  # tokens of a continuation by the target
DATA = "data.npz"  # in the state of a run, its tokens for training and measuring


@dataclass(frozen=True)
class Kind:
    """Functions of one kind of drafter for the loop; params are the drafter's parameters, trained and frozen."""

    name: str  # one of KINDS
    num_draft_tokens: int
    head: Any = None  # `Eagle3Head` or `BlockHead`; None for Medusa
    num_anchors: int = 0  # blocks a row of a batch
    mask_token: int = 0  # of P-EAGLE
    vocab: training.Vocabulary | None = None  # of the drafts; None is the whole one

    def unroll(self, params: PyTree, batch: Batch, key: Array) -> Steps:
        """Return the steps of a batch."""
        count = self.num_draft_tokens
        match self.name:
            case "eagle3":
                return training.feature_unroll(self.head, params, batch, steps=count)
            case "p_eagle":
                given = key, self.head, params, batch
                return training.depth_unroll(*given, mask_token=self.mask_token, depths=count, keep=KEEP)
            case "medusa":
                return training.medusa_unroll(params["heads"], batch)
            case _:
                anchors = training.anchors(key, batch, count=self.num_anchors)
                return training.block_unroll(self.head, params, batch, anchors)

    def logits(self, params: PyTree, step: int, rows: tuple[Array, Array]) -> Array:
        """Return the logits [N, D] of a step, given its outputs [N, h] and the tokens before the labels [N]."""
        output, previous = (x[None] for x in rows)
        if self.name == "medusa":
            return head_logits(params["heads"][step], output)[0]
        logits = self.head.logits(params, output)
        if self.name == "dspark":
            logits += self.head.markov_logits(params, previous)
        return logits[0]

    def proposer(self, params: PyTree) -> Proposer:
        """Return the drafter that decodes with what was trained."""
        vocab = self.vocab
        reduced = None if vocab is None else reduced_vocabulary(np.asarray(vocab.ids), len(vocab.t2d))
        given = self.head, params, self.num_draft_tokens
        match self.name:
            case "eagle3":
                return eagle3(*given, reduced=reduced)
            case "p_eagle":
                return p_eagle(*given, mask_token=self.mask_token, reduced=reduced)
            case "medusa":
                return medusa(params["heads"], vocab_size=params["heads"][0]["head"].shape[0])
            case "dflash":
                return dflash(*given, reduced=reduced)
            case _:
                return dspark(*given, reduced=reduced)


def layers_of(num_layers: int, kind: str) -> tuple[int, ...]:
    """Return the layers of a target that a drafter reads by default."""
    if kind == "medusa":
        return ()
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 8 else (0, num_layers // 2, num_layers)


def new_drafter(
    kind: str,
    target: Model,
    num_draft_tokens: int,
    num_anchors: int,
    mask_token: int,
    vocab: training.Vocabulary | None,
    key: Array,
) -> tuple[Kind, PyTree, PyTree]:
    """Return a kind with initial parameters, float32: those to train, and frozen ones, which are the target's."""
    weights, config = target_weights(target), target.apply.config
    embedding, table = (x.astype(jnp.float32) for x in (weights.embedding, weights.head))
    size = table.shape[1]
    if kind == "medusa":
        block = {"weight": jnp.zeros((size, size)), "bias": jnp.zeros(size)}
        heads = [{"blocks": [block], "head": table} for _ in range(num_draft_tokens)]
        return Kind(kind, num_draft_tokens), {"heads": heads}, {}
    num_taps, is_block = len(layers_of(config.num_layers, kind)), kind in ("dflash", "dspark")
    table = table if vocab is None else table[vocab.ids]
    layers = DecoderConfig(
        vocab_size=len(table),
        hidden_size=size,
        num_layers=NUM_LAYERS[kind],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=config.mlp_size,
        max_length=config.max_length,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        layers=(LayerConfig(Attention(has_head_norms=is_block)),),
    )
    if not is_block:
        head = proposers.Eagle3Head(layers, size, num_taps)
        params = trunk.random_params(head.shapes(), key) | {"lm_head": table}
        if kind == "p_eagle":
            params["mask_taps"] = jax.random.normal(jax.random.fold_in(key, 1), (num_taps * size,))
        made = Kind(kind, num_draft_tokens, head, mask_token=mask_token, vocab=vocab)
        return made, params, {"embedding": embedding}
    head = BlockHead(layers, num_taps, size, target.vocab_size, num_draft_tokens + 1, mask_token)
    if kind == "dspark":
        head = replace(head, block_size=num_draft_tokens, from_anchor=True, markov_rank=MARKOV_RANK, confidence="both")
    frozen = {"embedding": embedding, "lm_head": table}
    return Kind(kind, num_draft_tokens, head, num_anchors, vocab=vocab), trunk.random_params(head.shapes(), key), frozen


def target_logits(target: Model) -> Callable[[Array], Array]:
    """Return the function that makes logits [N, V] of final hidden states [N, H]."""
    softcap = getattr(target.apply.config, "logit_softcap", None)
    head = target_weights(target).head

    def logits(hidden: Array) -> Array:
        values = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
        return values if softcap is None else softcap * jnp.tanh(values / softcap)

    return logits


@dataclass(frozen=True)
class Plan:
    """Numbers of a run."""

    steps: int | None  # None goes by minutes
    minutes: float | None
    rate: float  # largest learning rate
    seed: int
    loss: str
    every: int  # steps between measurements, and between checkpoints
    dtype: Any  # of the computation; parameters are float32

    def rate_at(self, share: float) -> float:
        """Return the learning rate, which rises and then falls as a cosine does."""
        fall = max(0.0, share - WARM_UP) / (1 - WARM_UP)
        return self.rate * min(1.0, (share + 1e-3) / WARM_UP) * (FINAL + (1 - FINAL) * (1 + np.cos(np.pi * fall)) / 2)


def loss_of(
    params: PyTree, frozen: PyTree, target: Model, rows: Batch, key: Array, *, kind: Kind, plan: Plan
) -> tuple[Array, Array]:
    """Return the loss of a batch, a weighted mean over steps, and the mean acceptance rate of each step [K]."""
    params = jax.tree.map(lambda x: x.astype(plan.dtype), params | frozen)
    steps = kind.unroll(params, training.features(target, rows, target.feature_layers), key)
    values, rates = [], []
    for j, mask in enumerate(steps.masks):
        value, rate = of_step(params, target, steps, j, kind, plan.loss)
        count = jnp.maximum(mask.sum(), 1)
        # EAGLE-3 and Medusa learn at every token, and best with a mean over all, masked or not.
        values.append(value.sum() / (mask.size if kind.name in ("eagle3", "medusa") else count))
        rates.append(rate.sum() / count)
    weights = losses.position_decay(len(values), ratio=DECAY)
    return jnp.sum(weights * jnp.stack(values)) / weights.sum(), jnp.stack(rates)


def of_step(params: PyTree, target: Model, steps: Steps, j: int, kind: Kind, loss: str) -> tuple[Array, Array]:
    """Return the losses and the acceptance rates [B, N] of a step, which are 0 where its mask is false."""
    output, mask, previous = steps.outputs[j], steps.masks[j], steps.previous[j]

    def both(draft_logits: Array, target_logits: Array, *tokens: Array, vocab: training.Vocabulary | None = None):
        rate = losses.acceptance_rate(draft_logits, target_logits, vocab=vocab)
        return LOSSES[loss](draft_logits, target_logits, *tokens, vocab=vocab), jax.lax.stop_gradient(rate)

    value, rate = losses.from_hidden(
        both,
        (output, previous),
        partial(kind.logits, params, j),
        steps.target_hidden[j],
        target_logits(target),
        mask=mask,
        tokens=steps.labels[j] if loss in READS_TEXT else None,
        chunk=min(mask.size, max(256, MOST_LOGITS // target.vocab_size)),
        vocab=kind.vocab,
    )
    if kind.name == "dspark":
        confidence = kind.head.confidence_logits(params, output, previous)
        value += jnp.where(mask, losses.confidence_loss(confidence, rate), 0)
    return value, rate


class Data:
    """Rows to train on, in an order that the seed and the step decide, on devices that share each batch.

    As many devices share a batch as divide it; None are the local ones.
    """

    def __init__(self, batch: Batch, batch_size: int, seed: int, devices: Sequence[jax.Device] | None = None):
        if len(batch.tokens) < batch_size:
            raise ValueError(f"data must fill a batch of {batch_size} rows, got {len(batch.tokens)}")
        self._batch, self.batch_size, self._seed = batch, batch_size, seed
        self.num_tokens = batch_size * batch.tokens.shape[1]  # of a batch
        devices = jax.local_devices() if devices is None else devices
        devices = devices[: math.gcd(len(devices), batch_size)]
        mesh = Mesh(np.array(devices), ("data",))
        self.whole: jax.sharding.Sharding = NamedSharding(mesh, PartitionSpec())  # of what each device has a copy of
        self.split: jax.sharding.Sharding = NamedSharding(mesh, PartitionSpec("data"))  # of batches
        if len(devices) == 1:
            self.whole = self.split = SingleDeviceSharding(devices[0])

    def rows(self, step: int) -> Batch:
        """Return the batch of a step. Every row comes once an epoch, but for a rest that does not fill a batch."""
        per_epoch = len(self._batch.tokens) // self.batch_size
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._batch.tokens))
        rows = order[place * self.batch_size :][: self.batch_size]
        return jax.device_put(jax.tree.map(lambda x: x[rows], self._batch), self.split)


def train(
    kind: Kind,
    params: PyTree,
    frozen: PyTree,
    target: Model,
    data: Data,
    plan: Plan,
    look: Callable[[int, PyTree], None],
    checkpoint: Path | None = None,
) -> PyTree:
    """Train a drafter and return its parameters, float32.

    Args:
        kind: kind of the drafter.
        params: parameters to train.
        frozen: parameters that stay as they are.
        target: target with the feature layers that the drafter reads.
        data: rows to train on. Its devices each have a copy of all parameters.
        plan: numbers of the run.
        look: called with the step and the parameters at step 0, every `plan.every` steps, and at the end.
        checkpoint: directory of checkpoints, from which training continues; None keeps nothing.
    """
    transform = optax.chain(optax.clip_by_global_norm(CLIP), optax.scale_by_adam(b2=0.95))
    params, frozen, target = (jax.device_put(tree, data.whole) for tree in (params, frozen, target))
    params = jax.tree.map(jnp.copy, params)  # to donate
    state = jax.device_put(transform.init(params), data.whole)
    key = jax.random.key(plan.seed)
    objective = jax.value_and_grad(partial(loss_of, kind=kind, plan=plan), has_aux=True)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=data.whole)
    def step(params, state, batch, number, rate):
        frozen, target, rows = batch
        losses, gradient = objective(params, frozen, target, rows, jax.random.fold_in(key, number))
        update, state = transform.update(gradient, state, params)
        return jax.tree.map(lambda x, y: x - rate * y, params, update), state, losses

    def report(now: Progress) -> None:
        if now.losses is None and now.step:
            print(f"going on from step {now.step}", flush=True)
            return
        if now.losses is not None:
            value, rates = now.losses
            numbers, speed = " ".join(f"{x:.3f}" for x in rates.tolist()), now.steps_per_second * data.num_tokens
            text = f"step {now.step} ({now.share:.0%}): loss {value:.4f}, rates {numbers}, {speed:,.0f} tokens/s"
            print(text, flush=True)
        look(now.step, now.params)

    params, _ = training.fit(
        params,
        state,
        [Stage(step, lambda number: (frozen, target, data.rows(number)))],
        plan.rate_at,
        steps=plan.steps,
        seconds=None if plan.minutes is None else 60 * plan.minutes,
        every=plan.every,
        report=report,
        checkpoint=checkpoint,
    )
    return params


def pieces(documents: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return at most `count` pieces of PROMPT tokens of documents, spread evenly over all of them."""
    found = [list(ids[i : i + PROMPT]) for ids in documents for i in range(0, len(ids) - PROMPT + 1, PROMPT)]
    if not found:
        raise ValueError(f"one of the documents must have {PROMPT} tokens, got at most {max(map(len, documents))}")
    return [found[i] for i in np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)]


def measure(target: Model, proposer: Proposer, prompts: list[list[int]], max_tokens: int | None = None) -> list[float]:
    """Return mean acceptance lengths at temperatures 0 and 0.8.

    The drafts follow held-out text in one step, or stand in `max_tokens` tokens that the target goes on with.
    """
    lengths = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens or 16, ignore_eos=True)
        steps = 1 if max_tokens is None else None
        found = training.replay(target, proposer, prompts, params, key=jax.random.key(0), max_steps=steps)
        lengths.append(found.tokens_per_step)
    return lengths


def split(documents: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the documents to train on and those held out, of which one has at least PROMPT tokens."""
    held_out = [ids for i, ids in enumerate(documents) if i % HELD_OUT == HELD_OUT // 2]
    if not any(len(ids) >= PROMPT for ids in held_out):
        if len(documents) < 2:
            raise ValueError("data must hold at least two texts, one of which is held out, got one")
        return documents[:-1], documents[-1:]
    return [ids for i, ids in enumerate(documents) if i % HELD_OUT != HELD_OUT // 2], held_out


def continuations(args: argparse.Namespace, documents: list[list[int]]) -> list[training.Document]:
    """Let the target continue pieces of documents, half of them greedily."""
    llm = specjax.LLM(args.target, dtype=args.dtype, num_draft_tokens=0)
    prompts = pieces(documents, args.regenerate)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=args.seed + i, max_tokens=SAMPLE) for i in range(len(prompts))
    ]
    return training.regenerate(llm, prompts, params)


def check_arguments(args: argparse.Namespace) -> None:
    """Keep the arguments in `--out`, and raise ValueError where a run that made its data there had others."""
    if args.vocab_size is not None and args.kind == "medusa":
        raise ValueError("--vocab-size must be absent for medusa, whose heads have the target's vocabulary")
    layouts = LAYOUTS[args.kind]
    if args.layout not in (None, *layouts):
        raise ValueError(f"--layout must be {' or '.join(layouts)} for {args.kind}, got {args.layout}")
    path, data = (args.out / "state" / name for name in ("arguments.json", DATA))
    given = {name: str(value) for name, value in vars(args).items() if name != "out"}
    if path.is_file() and data.is_file():
        before = json.loads(path.read_text())
        changed = sorted(name for name in given.keys() | before.keys() if given.get(name) != before.get(name))
        if changed:
            raise ValueError(
                f"--out must be a new directory or have a run of the same arguments, got {args.out}, where these "
                f"differ: {', '.join(f'{name} was {before.get(name)}' for name in changed)}"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(given, indent=1) + "\n")


def read_data(args: argparse.Namespace, vocab_size: int) -> tuple[Batch, list[list[int]], np.ndarray]:
    """Return packed rows, held-out prompts and the counts of tokens, or load them from an earlier run."""
    path = args.out / "state" / DATA
    if not path.is_file():
        tokenizer = Checkpoint(args.target).tokenizer()
        texts = training.documents(args.data)
        documents, held_out = split([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        made = continuations(args, documents) if args.regenerate else []
        batch = training.pack([*documents, *made], args.length)
        counts = np.bincount(batch.tokens[batch.loss_mask], minlength=vocab_size)
        part = path.with_suffix(".part.npz")
        fields = {name: value for name, value in batch._asdict().items() if value is not None}
        np.savez(part, prompts=np.array(pieces(held_out, args.num_prompts)), counts=counts, **fields)
        part.replace(path)
    found = np.load(path)
    rows = Batch(found["tokens"], found["segments"], found["loss_mask"])
    return rows, found["prompts"].tolist(), found["counts"]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", type=Path, default=models.EMBEDDED / "target", help="checkpoint of the target")
    options.add_argument("--kind", choices=KINDS, default="eagle3")
    options.add_argument("--data", type=Path, nargs="+", required=True, help="files or directories of text")
    options.add_argument("--out", type=Path, required=True, help="directory for the drafter")
    options.add_argument("--layout", help="as training.save_pretrained takes it")
    options.add_argument("--num-draft-tokens", type=int, default=4, help="steps to unroll, heads or drafts of a block")
    options.add_argument("--vocab-size", type=int, help="tokens of the draft vocabulary, by default all")
    options.add_argument("--regenerate", type=int, default=0, help="continuations by the target to train on, too")
    options.add_argument(
        "--loss", choices=LOSSES, help="by default text_and_variation for dspark, and lk_hybrid for all others"
    )
    length = options.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=400)
    length.add_argument("--minutes", type=float, help="time to train, in place of steps")
    options.add_argument("--batch", type=int, default=8, help="rows of a step")
    options.add_argument("--length", type=int, default=256, help="tokens of a row")
    options.add_argument("--anchors", type=int, default=32, help="blocks in a row, for dflash and dspark")
    options.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    options.add_argument("--every", type=int, default=50, help="steps between measurements, and between checkpoints")
    options.add_argument("--num-prompts", type=int, default=128, help="held-out prompts to measure on")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    options.add_argument("--seed", type=int, default=0)
    return options


def main() -> None:
    args = parser().parse_args()
    check_arguments(args)
    target = models.load(args.target, dtype=args.dtype)
    target = models.with_feature_layers(target, layers_of(target.apply.config.num_layers, args.kind))
    rows, prompts, counts = read_data(args, target.vocab_size)
    vocab = None if args.vocab_size is None else training.vocabulary(counts, args.vocab_size)
    if vocab is not None:
        print(f"the draft vocabulary holds {counts[vocab.ids].sum() / counts.sum():.2%} of the tokens")
    mask_token = int(np.argmin(counts))
    kind, params, frozen = new_drafter(
        args.kind, target, args.num_draft_tokens, args.anchors, mask_token, vocab, jax.random.key(args.seed)
    )
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"{len(rows.tokens)} rows of {args.length} tokens, {len(prompts)} held-out prompts; "
        f"{size:,} parameters to train",
        flush=True,
    )

    def look(step: int, params: PyTree) -> None:
        whole = jax.tree.map(lambda x: x.astype(args.dtype), jax.device_get(params | frozen))
        lengths = measure(target, kind.proposer(whole), prompts)
        print(
            f"step {step}: mean acceptance length after held-out text {lengths[0]:.2f} at temperature 0, "
            f"{lengths[1]:.2f} at 0.8",
            flush=True,
        )

    steps = args.steps if args.minutes is None else None
    loss = args.loss or ("text_and_variation" if args.kind == "dspark" else "lk_hybrid")
    plan = Plan(steps, args.minutes, args.rate, args.seed, loss, args.every, jnp.dtype(args.dtype))
    data = Data(rows, args.batch, args.seed)
    params = train(kind, params, frozen, target, data, plan, look, args.out / "state" / "steps")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.device_get(params | frozen))
    trained = kind.proposer(half)
    training.save_pretrained(trained, args.out, target=target, layout=args.layout, target_name=str(args.target))
    loaded = proposers.load(args.out, target, num_draft_tokens=args.num_draft_tokens)
    lengths = measure(target, loaded, prompts, max_tokens=128)
    print(
        f"wrote {args.out}; mean acceptance length on the target's own text {lengths[0]:.2f} at temperature 0, "
        f"{lengths[1]:.2f} at 0.8"
    )


if __name__ == "__main__":
    main()
