"""Train the embedded family on Python source: a target, a draft model distilled from it, and heads on its features.

    python scripts/train_embedded.py
    python scripts/evaluate_embedded.py

The script writes Hugging Face checkpoints into `--out` and prints losses on held-out modules as it goes. It ends after
`--minutes`: learning rates follow the clock. It is meant for one GPU. It keeps its state in `--work`, so a run that
was cut off goes on where it was when the same command is given again, and the latest target is always in `--out`.

The corpus is the standard library and the installed packages of permissive licences, which `sources.json` lists; files
that share a run of 50 tokens with a held-out module are left out. The tokenizer is the one that the package ships.

The target first learns text, and then from its own continuations not to repeat itself. The draft first learns the
target's distribution on text, and then also on the target's own continuations, because in decoding it has to predict
those.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from python_corpus import STDLIB, Runs, read_corpus
from tokenizers import Tokenizer

from specjax.models import EMBEDDED, with_feature_layers
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.training import Batch, Progress, Stage, corpus, drafter, fit, losses, save_decoder, save_pretrained
from specjax.types import Array, Model, ModelInput, PyTree

TARGET = DecoderConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    mlp_size=704,
    max_length=2048,
)
DRAFT = DecoderConfig(
    vocab_size=4096,
    hidden_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=40,
    mlp_size=432,
    max_length=2048,
)
TARGET_RATE, CALM_RATE, DRAFT_RATE = 3e-3, 2e-4, 3e-3  # peak learning rates
WARM_UP, DECAY, LONG = 200, 0.5, 0.8  # steps of rising rates; share of the time when they begin to fall, rows to grow
RUN, TIMES = 8, 2  # the target shall not say a run of RUN tokens when it stood TIMES times before
REPEATED_WEIGHT = 2.0  # weight of the unlikelihood of a token that it shall not say; the divergence at others has 1
GREEDY_SHARE = 0.125  # of the continuations in which the target learns not to repeat itself; the draft sees half
STDLIB_SHARE, START_SHARE = 0.12, 0.2  # of the crops: from the standard library; from the first token of a document
TEXT_WEIGHT = 0.1  # weight of the text's cross entropy in the draft's loss; the divergence from the target has the rest
CROP, SAMPLE = 512, 256  # tokens per row in most training batches, and tokens per continuation of the target
MAX_VALIDATION = 1 << 18  # tokens, with the standard library first
STEPS_PER_CALL = 50  # steps between looks at the clock
SECONDS_PER_SAVE = 45
ROWS_PER_CALL = 2048  # continuations sampled in one call, limited by the memory of their cache
MAX_SHARD_BYTES = 14_000_000  # maximum size of a safetensors file
SHARES = {"target": 0.38, "calm": 0.08, "draft": 0.18, "eagle3": 0.18, "dflash": 0.18}  # of the minutes
HEAD_RATE, HEAD_DRAFTS, HEAD_ANCHORS, HEAD_EVERY = 2e-3, 4, 64, 200  # of heads, with the anchors of one row


class Texts(NamedTuple):
    """Token streams [N], with a separator before each document, and the place of each separator in `training`."""

    training: Array  # uint16, the standard library first
    starts: Array  # [D] int32
    num_stdlib: Array  # [] int32, tokens of the standard library
    validation: Array
    held_out: Array


def read_texts(args: argparse.Namespace, tokenizer: Tokenizer, log: Callable[[str], None]) -> Texts:
    """Read, filter and encode the corpus, or load it from an earlier run; write sources.json."""
    path = args.work / "corpus.npz"
    if path.is_file():
        return Texts(*(jnp.asarray(x) for x in np.load(path).values()))
    corpus = read_corpus(args.stdlib, site=args.site, packages=args.packages)
    log(f"read {sum(map(len, corpus.training.values())):,} files of {len(corpus.training)} sources")

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch(texts)]

    held_out = encode(corpus.held_out)
    runs = Runs(held_out, tokenizer.get_vocab_size())
    documents = {name: encode(texts) for name, texts in corpus.training.items()}
    kept = {name: [ids for ids in rows if not runs.are_in(ids)] for name, rows in documents.items()}
    validation = [ids for ids in encode(corpus.validation) if not runs.are_in(ids)]
    num_dropped = sum(len(documents[name]) - len(kept[name]) for name in kept)
    log(f"dropped {num_dropped} files that share a run of tokens with a held-out module")

    stream = [ids for name in sorted(kept, key=lambda name: name != STDLIB) for ids in kept[name]]
    num_tokens = {name: sum(map(len, rows)) for name, rows in kept.items()}
    starts = np.cumsum([0, *map(len, stream)])[:-1].astype(np.int32)
    empty = np.zeros(0, np.uint16)
    texts = Texts(
        np.concatenate(stream),
        starts,
        np.int32(num_tokens[STDLIB]),
        np.concatenate([*validation, empty]),
        np.concatenate(held_out),
    )
    rows = [
        {"name": s.name, "version": s.version, "licence": s.licence, "tokens": num_tokens[s.name]}
        for s in corpus.sources
    ]
    write(args.out / "sources.json", json.dumps(rows, indent=1) + "\n")
    np.savez(path, **texts._asdict())
    return Texts(*map(jnp.asarray, texts))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def bfloat16(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def logits_of(model: Model, tokens: Array) -> Array:
    """Return the logits [B, T, V] float32 of sequences of tokens [B, T] from position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.apply(model.params, ModelInput(tokens, positions), None)[0].logits


def crops(key: Array, texts: Texts, num_rows: int, length: int) -> Array:
    """Return pieces [num_rows, length] int32 of the training stream: some begin with a document, others anywhere."""
    keys = jax.random.split(key, 4)
    is_stdlib = jax.random.bernoulli(keys[0], STDLIB_SHARE, (num_rows,))
    size = len(texts.training)
    low, high = jnp.where(is_stdlib, 0, texts.num_stdlib % size), jnp.where(is_stdlib, texts.num_stdlib, size)
    anywhere = jax.random.randint(keys[1], (num_rows,), low, high)
    document = jax.random.randint(keys[2], (num_rows,), 0, len(texts.starts))
    is_start = jax.random.bernoulli(keys[3], START_SHARE, (num_rows,))
    start = jnp.minimum(jnp.where(is_start, texts.starts[document], anywhere), size - length)
    return texts.training[start[:, None] + jnp.arange(length)[None]].astype(jnp.int32)


def target_loss(params: PyTree, key: Array, texts: Texts, *, num_tokens: int, length: int) -> Array:
    """Return the cross entropy of the target on random crops."""
    rows = crops(key, texts, num_tokens // length, length + 1)
    logits = logits_of(decoder_model(TARGET, bfloat16(params)), rows[:, :-1])
    return losses.cross_entropy(logits, rows[:, 1:]).mean()


def is_repeated(tokens: Array) -> Array:
    """Return which tokens [B, T] stand in a run of RUN tokens that their row had TIMES times before."""
    same = tokens[:, :, None] == tokens[:, None, :]
    ends = same  # [B, T, T]: the runs that end at these two places are equal
    for i in range(1, RUN):
        ends &= jnp.pad(same, ((0, 0), (i, 0), (i, 0)))[:, :-i, :-i]
    is_last = jnp.tril(ends, -1).sum(-1) >= TIMES
    return jax.lax.reduce_window(is_last, False, jnp.logical_or, (1, RUN), (1, 1), ((0, 0), (0, RUN - 1)))


def unlikelihood(logits: Array, tokens: Array) -> Array:
    """Return -log(1 - p(token)) of tokens [...] under logits [..., V], by the sum over the other tokens."""
    is_token = jax.nn.one_hot(tokens, logits.shape[-1], dtype=bool)
    others = jax.nn.logsumexp(jnp.where(is_token, -jnp.inf, logits), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - others


def unlearned(texts: Texts) -> Texts:
    """Return texts whose training stream are the validation files, if these fill a row.

    The target is not to repeat itself after what its users write, which it has not learned either.
    """
    if len(texts.validation) <= SAMPLE:
        return texts
    starts = jnp.flatnonzero(texts.validation == 0).astype(jnp.int32)
    return texts._replace(training=texts.validation, starts=starts, num_stdlib=jnp.int32(len(texts.validation)))


def own_rows(params: PyTree, key: Array, before: Model, texts: Texts, *, num_rows: int) -> tuple:
    """Return data of `calm_loss`: continuations by the target, and which of their tokens it repeats."""
    rows, prompt_lengths = continuations(decoder_model(TARGET, bfloat16(params)), key, texts, num_rows, GREEDY_SHARE)
    is_own = jnp.arange(rows.shape[1])[None] >= prompt_lengths[:, None]
    is_marked = jax.lax.map(lambda row: is_repeated(row[None])[0], rows, batch_size=64) & is_own
    return before, texts, rows, is_marked


def calm_loss(
    params: PyTree, key: Array, before: Model, texts: Texts, rows: Array, is_marked: Array, *, num_tokens: int
) -> Array:
    """Return the loss by which a target learns not to repeat itself, and to stay as it is in all else.

    It is the unlikelihood of tokens that the target repeats too often in its own continuations, as Welleck et al.
    (2019) train sequences, and the divergence KL(before || target) at all other tokens, of these and of as many rows of
    text.

    Args:
        params: of the target, float32.
        key: decides which rows are taken.
        before: the target as it was.
        texts: where rows of text are from.
        rows: [N, SAMPLE+1] int32, continuations by the target.
        is_marked: [N, SAMPLE+1] bool, which tokens of theirs are repeated too often.
        num_tokens: of a step.
    """
    text_key, row_key = jax.random.split(key)
    num_rows = num_tokens // 2 // SAMPLE
    chosen = jax.random.randint(row_key, (num_rows,), 0, len(rows))
    both = jnp.concatenate([crops(text_key, texts, num_rows, SAMPLE + 1), rows[chosen]])
    marked = jnp.concatenate([jnp.zeros((num_rows, SAMPLE), bool), is_marked[chosen, 1:]])
    logits = logits_of(decoder_model(TARGET, bfloat16(params)), both[:, :-1])
    divergence = losses.forward_kl(logits, jax.lax.stop_gradient(logits_of(before, both[:, :-1])))
    return jnp.where(marked, REPEATED_WEIGHT * unlikelihood(logits, both[:, 1:]), divergence).mean()


def distillation_loss(params: PyTree, target: Model, rows: Array) -> Array:
    """Return the draft's loss on rows of tokens [B, T+1].

    It is KL(target || draft) plus their total variation, which is the rejection rate, with a small share of cross
    entropy on the tokens themselves.
    """
    draft_logits = logits_of(decoder_model(DRAFT, bfloat16(params)), rows[:, :-1])
    target_logits = jax.lax.stop_gradient(logits_of(target, rows[:, :-1]))
    divergence = losses.forward_kl(draft_logits, target_logits) + losses.total_variation(draft_logits, target_logits)
    cross_entropy = losses.cross_entropy(draft_logits, rows[:, 1:])
    return (1 - TEXT_WEIGHT) * divergence.mean() + TEXT_WEIGHT * cross_entropy.mean()


def text_loss(params: PyTree, key: Array, target: Model, texts: Texts, *, num_tokens: int, length: int) -> Array:
    """Return the draft's loss on random crops."""
    return distillation_loss(params, target, crops(key, texts, num_tokens // length, length + 1))


def mixed_loss(
    params: PyTree, key: Array, target: Model, texts: Texts, samples: Array, *, num_tokens: int, length: int
) -> Array:
    """Return the draft's loss, half on crops of the corpus and half on continuations [N, SAMPLE+1] by the target."""
    text_key, sample_key = jax.random.split(key)
    on_text = text_loss(params, text_key, target, texts, num_tokens=num_tokens // 2, length=length)
    row = jax.random.randint(sample_key, (num_tokens // 2 // SAMPLE,), 0, len(samples))
    return (on_text + distillation_loss(params, target, samples[row].astype(jnp.int32))) / 2


def optimizer() -> optax.GradientTransformation:
    """Return Muon for the matrices of layers and AdamW for all else, at a rate of 1: updates are multiplied by it.

    Parameters of the same name in all layers are one array there, so that Muon needs few launches of kernels.
    """

    def dimensions(params: PyTree) -> PyTree:
        def of_leaf(leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
            return optax.contrib.MuonDimensionNumbers(1, 2) if leaf.ndim == 3 else None

        return jax.tree.map(of_leaf, params)

    def stacked(params: PyTree) -> PyTree:
        return params | {"layers": jax.tree.map(lambda *layers: jnp.stack(layers), *params["layers"].values())}

    def update(gradient: PyTree, memory: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, memory = together.update(stacked(gradient), memory, stacked(params))
        layers = {i: jax.tree.map(lambda x, n=n: x[n], updates["layers"]) for n, i in enumerate(params["layers"])}
        return updates | {"layers": layers}, memory

    muon = optax.contrib.muon(
        1.0, weight_decay=0.1, adam_b2=0.95, muon_weight_dimension_numbers=dimensions, consistent_rms=0.2
    )
    together = optax.chain(optax.clip_by_global_norm(1.0), muon)
    return optax.GradientTransformation(lambda params: together.init(stacked(params)), update)


class Part(NamedTuple):
    """A loss (params, key, *data) from a share of the time on; it draws its own batch from the data."""

    begin: float
    loss: Callable[..., Array]
    data: tuple
    prepare: Callable[..., tuple] | None = None  # (params, key, *data) -> the data of the next STEPS_PER_CALL steps

    def stage(self, transform: optax.GradientTransformation) -> Stage:
        """Return the stage of the loop that takes STEPS_PER_CALL steps in a call."""
        run = partial(take_steps, transform, loss=self.loss, prepare=self.prepare)
        return Stage(jax.jit(run, donate_argnums=(0, 1)), lambda number: self.data, self.begin, STEPS_PER_CALL)


def train(
    name: str,
    params: PyTree,
    peak_rate: float,
    minutes: float,
    parts: list[Part],
    checkpoint: Path,
    look: Callable[[PyTree], None],
) -> PyTree:
    """Train for a time, at rates that rise, stay and fall with it, and return the parameters.

    Args:
        name: name of the model, for the log.
        params: initial parameters, float32.
        peak_rate: largest learning rate.
        minutes: time to train, earlier runs that were cut off included. Waiting for a program to be compiled is not.
        parts: losses and data, in the order of their begin.
        checkpoint: directory of checkpoints, from which training goes on.
        look: called with the parameters ten times, at the end included.
    """
    transform, looks = optimizer(), set(range(1, 11))

    def report(now: Progress) -> None:
        if now.losses is not None:
            loss, num_tokens = now.losses
            speed = now.steps_per_second * int(num_tokens)
            print(f"{name} {now.share:4.0%} step {now.step}: loss {loss:.3f}, {speed:,.0f} tokens/s", flush=True)
        elif now.step:
            print(f"{name}: going on from step {now.step}, {now.seconds:.0f} s", flush=True)
        tenth = int(10 * now.share)
        if tenth in looks:
            looks.remove(tenth)
            look(now.params)

    trained, _ = fit(
        params,
        transform.init(params),
        [part.stage(transform) for part in parts],
        lambda share: peak_rate * min(1.0, (1 - share) / (1 - DECAY)),
        seconds=60 * minutes,
        every=STEPS_PER_CALL,
        report=report,
        checkpoint=checkpoint,
        seconds_per_save=SECONDS_PER_SAVE,
    )
    return trained


def take_steps(
    transform: optax.GradientTransformation,
    params: PyTree,
    memory: PyTree,
    data: tuple,
    first: Array,
    rate: Array,
    *,
    loss: Callable[..., Array],
    prepare: Callable[..., tuple] | None,
) -> tuple[PyTree, PyTree, tuple[Array, int]]:
    """Take STEPS_PER_CALL steps; return parameters, the optimizer's memory, and mean loss and tokens of a step."""
    key = jax.random.key(1)
    if prepare is not None:
        data = prepare(params, jax.random.fold_in(jax.random.key(6), first), *data)

    def one(i, carry):
        params, memory, total = carry
        value, gradient = jax.value_and_grad(loss)(params, jax.random.fold_in(key, i), *data)
        update, memory = transform.update(gradient, memory, params)
        scale = rate * jnp.minimum(1.0, (i + 1) / WARM_UP)
        params = jax.tree.map(lambda p, u: p + scale * u, params, update)
        return params, memory, total + value

    start = params, memory, jnp.float32(0)
    params, memory, total = jax.lax.fori_loop(first, first + STEPS_PER_CALL, one, start)
    return params, memory, (total / STEPS_PER_CALL, loss.keywords["num_tokens"])


def look_at_target(texts: Texts, out: Path, params: PyTree) -> None:
    """Write a target, and print its losses."""
    model = decoder_model(TARGET, bfloat16(params))
    save(out / "target", TARGET, model.params)
    some = texts.validation[:MAX_VALIDATION]
    validation = mean_loss(model, some) if len(some) > CROP else np.nan
    held_out = mean_loss(model, texts.held_out)
    print(f"target: {validation:.3f} nats/token on validation files, {held_out:.3f} on held-out ones", flush=True)


def train_target(texts: Texts, minutes: float, num_tokens: int, work: Path, out: Path) -> PyTree:
    """Train the target, most of the time on short rows and at last on rows of the full length, for far positions."""
    parts = [
        Part(0.0, partial(target_loss, num_tokens=num_tokens, length=CROP), (texts,)),
        Part(LONG, partial(target_loss, num_tokens=num_tokens // 2, length=TARGET.max_length), (texts,)),
    ]
    look = partial(look_at_target, texts, out)
    return train("target", init_params(TARGET, seed=0), TARGET_RATE, minutes, parts, work / "target", look)


def calm_target(params: PyTree, texts: Texts, minutes: float, num_tokens: int, work: Path, out: Path) -> Model:
    """Train the target not to repeat itself, on continuations that are sampled anew every STEPS_PER_CALL steps."""
    before = decoder_model(TARGET, bfloat16(params))
    prepare = partial(own_rows, num_rows=ROWS_PER_CALL)
    part = Part(0.0, partial(calm_loss, num_tokens=num_tokens), (before, unlearned(texts)), prepare)
    look = partial(look_at_target, texts, out)
    params = train("calm target", params, CALM_RATE, minutes, [part], work / "calm", look)
    return decoder_model(TARGET, bfloat16(params))


def train_draft_model(
    target: Model, texts: Texts, samples: Array, minutes: float, num_tokens: int, work: Path, out: Path
) -> Model:
    """Train the draft: first on short rows of text, then on rows of the full length and the target's continuations."""

    def look(params: PyTree) -> None:
        model = decoder_model(DRAFT, bfloat16(params))
        save(out / "draft", DRAFT, model.params)
        report(target, model, texts.held_out)

    mixed = partial(mixed_loss, num_tokens=num_tokens, length=DRAFT.max_length)
    parts = [
        Part(0.0, partial(text_loss, num_tokens=num_tokens, length=CROP), (target, texts)),
        Part(0.25, mixed, (target, texts, samples)),
    ]
    params = train("draft", init_params(DRAFT, seed=1), DRAFT_RATE, minutes, parts, work / "draft", look)
    return decoder_model(DRAFT, bfloat16(params))


def train_head(
    name: str, target: Model, texts: Texts, samples: Array, minutes: float, num_tokens: int, out: Path
) -> None:
    """Train a drafter on the target's features, half on text and half on continuations by the target, and write it."""
    target = with_feature_layers(target, drafter.layers_of(TARGET.num_layers, name))
    rows = rows_with_samples(texts, np.asarray(samples))
    mask_token = int(np.argmin(np.bincount(np.asarray(texts.training), minlength=target.vocab_size)))
    kind, params, frozen = drafter.new_drafter(
        name, target, HEAD_DRAFTS, HEAD_ANCHORS, mask_token, None, jax.random.key(3)
    )
    held_out = np.asarray(texts.held_out).astype(int)
    prompts = corpus.pieces([held_out.tolist()], 64)

    def look(now: Progress) -> None:
        trained = kind.proposer(bfloat16(jax.device_get(now.params | frozen)))
        save_pretrained(trained, out / name, target=target)
        found = corpus.measure(target, trained, prompts, max_steps=1)
        lengths = ", ".join(f"{each.tokens_per_step:.2f} at temperature {t}" for t, each in found.items())
        print(f"{name} step {now.step}: {lengths}", flush=True)

    data = drafter.Data(rows, max(1, num_tokens // CROP), seed=4)
    plan = drafter.Plan(None, minutes, HEAD_RATE, 4, "lk_hybrid", HEAD_EVERY, jnp.bfloat16)
    drafter.train(kind, params, frozen, target, data, plan, look)


def rows_with_samples(texts: Texts, samples: np.ndarray) -> Batch:
    """Return rows [N, CROP] for heads: pieces of text, and as many of the target's continuations."""
    per_row = CROP // SAMPLE
    made = samples[: len(samples) // per_row * per_row, :SAMPLE].reshape(-1, per_row * SAMPLE).astype(np.int32)
    number = np.repeat(np.arange(1, per_row + 1, dtype=np.int32), SAMPLE)
    stream = np.asarray(texts.training)
    starts = np.random.default_rng(5).integers(0, len(stream) - made.shape[1], len(made))
    text = stream[starts[:, None] + np.arange(made.shape[1])].astype(np.int32)
    separators = np.cumsum(text == 0, axis=1, dtype=np.int32) + 1
    tokens, segments = np.concatenate([text, made]), np.concatenate([separators, np.broadcast_to(number, made.shape)])
    return Batch(tokens, segments, np.ones(tokens.shape, bool))


@jax.jit
def continue_rows(target: Model, key: Array, rows: Array, prompt_lengths: Array, temperature: Array) -> Array:
    """Keep the prompts of rows [N, T+1] and let the target generate the rest of each row at its temperature [N]."""

    def step(carry, i):
        token, cache = carry
        inputs = ModelInput(token[:, None], jnp.full((len(rows), 1), i))
        output, cache = target.apply(target.params, inputs, cache)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), (len(rows), target.vocab_size))
        sampled = jnp.argmax(output.logits[:, 0] + temperature[:, None] * noise, axis=-1)
        token = jnp.where(i + 1 < prompt_lengths, rows[:, i + 1], sampled)
        return (token, cache), token

    length = rows.shape[1] - 1
    _, tokens = jax.lax.scan(step, (rows[:, 0], target.init_cache(len(rows), length)), jnp.arange(length))
    return jnp.concatenate([rows[:, :1], tokens.T], axis=1)


def continuations(target: Model, key: Array, texts: Texts, num_rows: int, greedy_share: float) -> tuple[Array, Array]:
    """Return continuations [num_rows, SAMPLE+1] by the target of prompts of 32 to 64 tokens, and the prompts' lengths.

    A share of them is greedy, and the others are sampled at temperature 0.8.
    """
    crop_key, length_key, sample_key = jax.random.split(key, 3)
    rows = crops(crop_key, texts, num_rows, SAMPLE + 1)
    prompt_lengths = jax.random.randint(length_key, (num_rows,), 32, 65)
    temperature = jnp.where(jnp.arange(num_rows) % round(1 / greedy_share) == 0, 0.0, 0.8)
    return continue_rows(target, sample_key, rows, prompt_lengths, temperature), prompt_lengths


def sample_continuations(target: Model, texts: Texts, num_samples: int, path: Path) -> Array:
    """Sample continuations [num_samples, SAMPLE+1] uint16 by the target, or load the continuations of `path`."""
    if path.is_file():
        return jnp.asarray(np.load(path))
    num_rows = min(num_samples, ROWS_PER_CALL)
    keys = jax.random.split(jax.random.key(2), num_samples // num_rows)
    samples = jnp.concatenate([continuations(target, key, texts, num_rows, 0.5)[0].astype(jnp.uint16) for key in keys])
    np.save(path, np.asarray(samples))
    return samples


def rows_of(stream: Array) -> Array:
    """Cut a stream into rows [N, CROP+1] int32; a rest is left out."""
    return stream[: len(stream) // (CROP + 1) * (CROP + 1)].reshape(-1, CROP + 1).astype(jnp.int32)


def mean_loss(model: Model, stream: Array) -> float:
    """Return the mean cross entropy of a token of a stream, in rows of CROP + 1."""
    return float(_losses(model, rows_of(stream)))


@jax.jit
def _losses(model: Model, rows: Array) -> Array:
    return jax.lax.map(
        lambda row: losses.cross_entropy(logits_of(model, row[None, :-1])[0], row[1:]).mean(), rows
    ).mean()


@jax.jit
def compare(target: Model, draft: Model, rows: Array) -> Array:
    """Return draft loss, greedy agreement and acceptance rate at temperatures 0.8 and 1, over rows [N, T+1]."""

    def one(row):
        target_logits, draft_logits = logits_of(target, row[None, :-1])[0], logits_of(draft, row[None, :-1])[0]
        rates = [losses.acceptance_rate(draft_logits, target_logits, temperature=t).mean() for t in (0, 0.8, 1)]
        return jnp.stack([losses.cross_entropy(draft_logits, row[1:]).mean(), *rates])

    return jax.lax.map(one, rows).mean(0)


def report(target: Model, draft: Model, held_out: Array) -> None:
    """Print the loss of the draft on held-out text, and how well it predicts the target there."""
    loss, *rates = compare(target, draft, rows_of(held_out)).tolist()
    print(
        f"draft: {loss:.3f} nats/token on held-out files; acceptance rate of one token "
        f"{rates[0]:.3f}, {rates[1]:.3f} and {rates[2]:.3f} at temperatures 0, 0.8 and 1",
        flush=True,
    )


def save(directory: Path, config: DecoderConfig, params: PyTree) -> None:
    """Write a Hugging Face checkpoint, with safetensors files of at most MAX_SHARD_BYTES."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    save_decoder(config, params, directory, fields=ends, max_shard_bytes=MAX_SHARD_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="directory for target/, draft/ and sources.json")
    parser.add_argument(
        "--work", type=Path, default=Path("build/embedded"), help="directory of what a run goes on from"
    )
    parser.add_argument(
        "--minutes", type=float, default=15, help="time for training; compiling and reading need 2 to 4 more"
    )
    parser.add_argument("--stdlib", type=Path, help="standard library to train on, by default that of this Python")
    parser.add_argument("--site", type=Path, help="folder of packages to train on, as `pip install --target` fills")
    parser.add_argument(
        "--packages", action=argparse.BooleanOptionalAction, default=True, help="whether to train on installed ones"
    )
    parser.add_argument("--num-tokens", type=int, default=65536, help="tokens per step, at least 8192")
    parser.add_argument("--num-samples", type=int, default=32 * ROWS_PER_CALL, help="continuations that the draft sees")
    args = parser.parse_args()
    begin = time.perf_counter()
    args.work.mkdir(parents=True, exist_ok=True)

    def log(message: str) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s] {message}", flush=True)

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    for name in ("tokenizer.json", "target/chat_template.jinja"):
        write(args.out / name, (EMBEDDED / name).read_text())
    texts = read_texts(args, tokenizer, log)
    size = sum(x.size for x in jax.tree.leaves(init_params(TARGET, seed=0)))
    log(
        f"{len(texts.training):,} training and {len(texts.held_out):,} held-out tokens; a target of {size:,} "
        f"parameters, {6e-6 * size:.0f} MFLOP a token, on {jax.devices()[0].device_kind}"
    )
    params = train_target(texts, SHARES["target"] * args.minutes, args.num_tokens, args.work, args.out)
    log("target trained")
    target = calm_target(params, texts, SHARES["calm"] * args.minutes, args.num_tokens // 2, args.work, args.out)
    log("target trained not to repeat itself")
    samples = sample_continuations(target, texts, args.num_samples, args.work / "samples.npy")
    log(f"{len(samples)} continuations sampled; one: {tokenizer.decode(samples[1].tolist())!r}")
    minutes = SHARES["draft"] * args.minutes
    train_draft_model(target, texts, samples, minutes, args.num_tokens // 2, args.work, args.out)
    log("draft trained")
    for name in ("eagle3", "dflash"):
        done = args.work / f"{name}.done"
        if not done.is_file():
            train_head(name, target, texts, samples, SHARES[name] * args.minutes, args.num_tokens // 4, args.out)
            done.touch()
        log(f"{name} trained")


if __name__ == "__main__":
    main()
