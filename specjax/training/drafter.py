"""Train a drafter on the features of a target: its parameters, its loss, its batches, and the run.

The drafter learns the target's distribution at every token. `specjax train` is the command; optax, which the extra
`train` brings, is imported by `train` alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from specjax import proposers
from specjax.models.decoder import DecoderConfig
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import dflash, dspark, eagle3, medusa, p_eagle, trunk
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.drawing import reduced_vocabulary
from specjax.proposers.files import target_weights
from specjax.proposers.medusa import head_logits
from specjax.training import losses, unroll
from specjax.training.loop import Progress, Stage, fit
from specjax.training.unroll import Batch, Steps
from specjax.training.vocabulary import Vocabulary, vocabulary
from specjax.types import Array, Model, Proposer, PyTree
from specjax.validation.extras import needs

KINDS = "dflash", "dspark", "eagle3", "medusa", "p_eagle"
LOSSES = {
    "forward_kl": losses.forward_kl,
    "lk_hybrid": losses.lk_hybrid,
    "negative_log_acceptance": losses.negative_log_acceptance,
    "text_and_variation": losses.text_and_variation,
    "total_variation": losses.total_variation,
}
READS_TEXT = ("text_and_variation",)
OPTIMIZERS = "adam", "muon"
DECAY = 0.8  # weight of a step in the loss, relative to the step before
NUM_LAYERS = {"eagle3": 1, "p_eagle": 2, "dflash": 2, "dspark": 2}
KEEP = 0.7  # of the tokens after which P-EAGLE learns one draft, the share after which it learns one more
MARKOV_RANK = 64  # numbers by which the token before a draft of DSpark changes its logits
CLIP = 1.0  # largest norm of a gradient
ADAM_B2 = 0.95
MUON_RMS = 0.2  # root of the mean square of an update, which Adam's have, too
MOST_LOGITS = 2**26  # numbers of a chunk of logits, at which no less than 256 rows are taken at a time
WARM_UP, FINAL = 0.05, 0.05  # share of the run in which rates rise; the last rate as a share of the largest


@dataclass(frozen=True)
class Kind:
    """Functions of one kind of drafter for the loop; params are the drafter's parameters, trained and frozen."""

    name: str  # one of KINDS
    num_draft_tokens: int
    head: Any = None  # `Eagle3Head` or `BlockHead`; None for Medusa
    num_anchors: int = 0  # blocks a row of a batch
    mask_token: int = 0  # of P-EAGLE
    vocab: Vocabulary | None = None  # of the drafts; None is the whole one

    def unroll(self, params: PyTree, batch: Batch, key: Array) -> Steps:
        """Return the steps of a batch."""
        count = self.num_draft_tokens
        match self.name:
            case "eagle3":
                return unroll.feature_unroll(self.head, params, batch, steps=count)
            case "p_eagle":
                given = key, self.head, params, batch
                return unroll.depth_unroll(*given, mask_token=self.mask_token, depths=count, keep=KEEP)
            case "medusa":
                return unroll.medusa_unroll(params["heads"], batch)
            case _:
                anchors = unroll.anchors(key, batch, count=self.num_anchors)
                return unroll.block_unroll(self.head, params, batch, anchors)

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
    vocab: Vocabulary | None,
    key: Array,
    *,
    num_layers: int | None = None,
    mlp_size: int | None = None,
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
        num_layers=num_layers or NUM_LAYERS[kind],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=mlp_size or config.mlp_size,
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


def vocabulary_of(drafter: Proposer, vocab_size: int) -> Vocabulary | None:
    """Return the draft vocabulary of a loaded drafter, or None."""
    reduced = getattr(drafter, "reduced", None)
    if reduced is None:
        return None
    ids = np.asarray(reduced.target_ids)
    return vocabulary(np.bincount(ids, minlength=vocab_size), len(ids))


def begin_with(drafter: Proposer, kind: Kind, params: PyTree) -> tuple[Kind, PyTree]:
    """Return the network and the trained parameters, float32, of a loaded drafter in place of new ones.

    The matrices keep the orientation in which the drafter was loaded.

    Raises:
        ValueError: the drafter is of another kind, or has parameters of other shapes.
    """
    head = getattr(drafter, "head", None)
    found = {"heads": getattr(drafter, "heads", None)} if kind.head is None else getattr(drafter, "params", {})
    expected, found = jax.tree.map(jnp.shape, params), {name: found.get(name) for name in params}
    if type(head) is not type(kind.head):
        raise ValueError(f"the first drafter must be of kind {kind.name}, got {type(drafter).__name__} with {head}")
    if kind.head is not None and head is not None:
        layers = replace(kind.head.config, transposed=head.config.transposed)
        expected |= replace(kind.head, config=layers).shapes()
        sizes = [getattr(one, "block_size", None) for one in (kind.head, head)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the first drafter must have blocks of {sizes[0]} tokens, got {sizes[1]}")
    if (shapes := jax.tree.map(jnp.shape, found)) != expected:
        raise ValueError(f"the first drafter must have parameters of the shapes {expected}, got {shapes}")
    return replace(kind, head=head), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)


def target_logits(target: Model, ids: Array | None = None) -> Callable[[Array], Array]:
    """Return the function that makes logits [N, V], or [N, D] of the tokens `ids`, of final hidden states [N, H]."""
    softcap, divisor = (getattr(target.apply.config, name, None) for name in ("logit_softcap", "logit_divisor"))
    head = target_weights(target).head
    head = head if ids is None else head[ids]

    def logits(hidden: Array) -> Array:
        values = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
        values = values if divisor is None else values / divisor
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
    optimizer: str = "adam"  # one of OPTIMIZERS

    def rate_at(self, share: float) -> float:
        """Return the learning rate, which rises and then falls as a cosine does."""
        fall = max(0.0, share - WARM_UP) / (1 - WARM_UP)
        return self.rate * min(1.0, (share + 1e-3) / WARM_UP) * (FINAL + (1 - FINAL) * (1 + np.cos(np.pi * fall)) / 2)


def loss_of(
    params: PyTree, frozen: PyTree, target: Model, rows: Batch, key: Array, *, kind: Kind, plan: Plan
) -> tuple[Array, Array]:
    """Return the loss of a batch, a weighted mean over steps, and the mean acceptance rate of each step [K]."""
    params = jax.tree.map(lambda x: x.astype(plan.dtype), params | frozen)
    batch = unroll.features(target, rows, target.feature_layers)
    steps = kind.unroll(params, batch, key)
    others = None if kind.vocab is None else logit_of_others(target, batch.features.hidden, kind.vocab)
    values, rates = [], []
    for j, mask in enumerate(steps.masks):
        value, rate = of_step(params, target, steps, j, kind, plan.loss, others)
        count = jnp.maximum(mask.sum(), 1)
        # EAGLE-3 and Medusa learn at every token, and best with a mean over all, masked or not.
        values.append(value.sum() / (mask.size if kind.name in ("eagle3", "medusa") else count))
        rates.append(rate.sum() / count)
    weights = losses.position_decay(len(values), ratio=DECAY)
    return jnp.sum(weights * jnp.stack(values)) / weights.sum(), jnp.stack(rates)


def logit_of_others(target: Model, hidden: Array, vocab: Vocabulary) -> Array:
    """Return the logit that all tokens outside a draft vocabulary would have as one token.

    So a step of the unroll needs the target's logits of the draft vocabulary alone.

    Args:
        target: the target.
        hidden: [B, L, H], its final hidden states, constants for any gradient.
        vocab: the draft vocabulary.

    Returns:
        [B, L] float32, the logarithm of the sum of exp(logit) over the tokens that the vocabulary lacks.
    """
    is_held = jnp.asarray(vocab.t2d)

    def logit(_: Array, target_logits: Array) -> Array:
        return jax.nn.logsumexp(jnp.where(is_held, -jnp.inf, target_logits), axis=-1)

    mask = jnp.ones(hidden.shape[:-1], bool)
    given = hidden, target_logits(target)
    return losses.from_hidden(logit, hidden, lambda rows: rows, *given, mask=mask, chunk=_rows(mask, target.vocab_size))


def _rows(mask: Array, size: int) -> int:
    """Return how many rows of logits of this size exist at a time, of the rows of a mask."""
    return min(mask.size, max(256, MOST_LOGITS // size))


class _Labels(NamedTuple):
    """The target of a step as `losses.from_hidden` takes it."""

    hidden: PyTree
    logits: Callable[[PyTree], Array]
    tokens: Array  # [B, N] int32
    size: int  # of the logits
    vocab: Vocabulary | None


def _labels(target: Model, steps: Steps, j: int, vocab: Vocabulary | None, others: Array | None) -> _Labels:
    """Return the target of a step: over its whole vocabulary, or over the draft vocabulary and one token for others."""
    hidden, tokens = steps.target_hidden[j], steps.labels[j]
    if vocab is None or others is None:
        return _Labels(hidden, target_logits(target), tokens, target.vocab_size, vocab)
    ids = jnp.asarray(vocab.ids)
    count = len(ids)
    of_ids = target_logits(target, ids)

    def logits(given: tuple[Array, Array]) -> Array:
        hidden, others = given
        return jnp.concatenate([of_ids(hidden), others[:, None]], axis=-1)

    place = jnp.minimum(jnp.searchsorted(ids, tokens), count - 1)
    tokens = jnp.where(ids[place] == tokens, place, count)
    others = jnp.take_along_axis(unroll.shift(others, j), steps.rows[j], axis=1)
    index = np.arange(count + 1, dtype=np.int32)
    held = Vocabulary(index[:count], np.zeros(count, np.int32), index < count)
    return _Labels((hidden, others), logits, tokens, count + 1, held)


def of_step(
    params: PyTree, target: Model, steps: Steps, j: int, kind: Kind, loss: str, others: Array | None
) -> tuple[Array, Array]:
    """Return the losses and the acceptance rates [B, N] of a step, which are 0 where its mask is false.

    Where the kind has a draft vocabulary, `others` [B, L] is the `logit_of_others` of the batch.
    """
    output, mask, previous = steps.outputs[j], steps.masks[j], steps.previous[j]
    labels = _labels(target, steps, j, kind.vocab, others)

    def both(draft_logits: Array, target_logits: Array, *tokens: Array, vocab: Vocabulary | None = None):
        rate = losses.acceptance_rate(draft_logits, target_logits, vocab=vocab)
        return LOSSES[loss](draft_logits, target_logits, *tokens, vocab=vocab), jax.lax.stop_gradient(rate)

    value, rate = losses.from_hidden(
        both,
        (output, previous),
        partial(kind.logits, params, j),
        labels.hidden,
        labels.logits,
        mask=mask,
        tokens=labels.tokens if loss in READS_TEXT else None,
        chunk=_rows(mask, labels.size),
        vocab=labels.vocab,
    )
    if kind.name == "dspark":
        confidence = kind.head.confidence_logits(params, output, previous)
        value += jnp.where(mask, losses.confidence_loss(confidence, rate), 0)
    return value, rate


class Data:
    """Rows to train on, in an order that the seed and the step decide, on devices that share each batch.

    As many devices share a batch as divide it; None are the local ones.
    """

    def __init__(self, batch: Batch, batch_size: int, seed: int, devices: Sequence[Any] | None = None):
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


def optimizer_of(name: str) -> Any:
    """Return the transformation of optax from gradients to updates, which the learning rate then scales.

    "adam" takes Adam; "muon" makes the updates of all matrices but heads over the vocabulary orthogonal, at the size of
    Adam's, and leaves the other parameters to Adam with Nesterov's momentum.

    Raises:
        ModuleNotFoundError: optax is missing.
    """
    with needs("train"):
        import optax
        from optax import contrib
    clip = optax.clip_by_global_norm(CLIP)
    if name == "adam":
        return optax.chain(clip, optax.scale_by_adam(b2=ADAM_B2))

    def sides(params: PyTree) -> PyTree:
        def of(path: tuple[Any, ...], x: Array) -> Any:
            is_head = "head" in jax.tree_util.keystr(path[-1:])
            return None if is_head or x.ndim != 2 else contrib.MuonDimensionNumbers(0, 1)

        return jax.tree_util.tree_map_with_path(of, params)

    # The negative rates undo the sign of a descent, which the step takes itself.
    return optax.chain(
        clip,
        contrib.muon(
            learning_rate=-1.0,
            adam_learning_rate=-1.0,
            consistent_rms=MUON_RMS,
            adam_b2=ADAM_B2,
            muon_weight_dimension_numbers=sides,
        ),
    )


def train(
    kind: Kind,
    params: PyTree,
    frozen: PyTree,
    target: Model,
    data: Data,
    plan: Plan,
    report: Callable[[Progress], None] = lambda progress: None,
    **options: Any,
) -> PyTree:
    """Train a drafter and return its parameters, float32.

    Args:
        kind: kind of the drafter.
        params: parameters to train.
        frozen: parameters that stay as they are.
        target: target with the feature layers that the drafter reads.
        data: rows to train on. Its devices each have a copy of all parameters.
        plan: numbers of the run.
        report: called at step 0, every `plan.every` steps, and at the end. The losses of its `Progress` are the loss of
            a batch, and the acceptance rates of its steps [K].
        options: `checkpoint`, `seconds_per_save`, `on_step` and `should_stop`, as `fit` takes them.

    Raises:
        ModuleNotFoundError: optax is missing, or orbax-checkpoint where there is a checkpoint.
    """
    transform = optimizer_of(plan.optimizer)
    params, frozen, target = (jax.device_put(tree, data.whole) for tree in (params, frozen, target))
    params = jax.tree.map(jnp.copy, params)  # to donate
    state = jax.device_put(transform.init(params), data.whole)
    key = jax.random.key(plan.seed)
    objective = jax.value_and_grad(partial(loss_of, plan=plan), has_aux=True)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=data.whole)
    def step(params, state, batch, number, rate):
        frozen, target, rows, vocab = batch  # an argument, so that all vocabularies of a size share a program
        given = params, frozen, target, rows, jax.random.fold_in(key, number)
        losses, gradient = objective(*given, kind=replace(kind, vocab=vocab))
        update, state = transform.update(gradient, state, params)
        return jax.tree.map(lambda x, y: x - rate * y, params, update), state, losses

    params, _ = fit(
        params,
        state,
        [Stage(step, lambda number: (frozen, target, data.rows(number), kind.vocab))],
        plan.rate_at,
        steps=plan.steps,
        seconds=None if plan.minutes is None else 60 * plan.minutes,
        every=plan.every,
        report=report,
        **options,
    )
    return params
