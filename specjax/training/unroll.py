"""Steps of a drafter on known text, for the losses, unrolled from every row at once.

Row s of a document is made of token s and of the target's feature of token s-1, as in decoding, and predicts token s+1.
Its target distribution is the one that the target has after token s.

Shapes: B sequences, L tokens, H hidden size of the target, h of the drafter, J unrolled steps, N outputs of a step in
each sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import HeadNorms
from specjax import models
from specjax.models.attention import placed
from specjax.models.rope import Rotation
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.eagle3 import Eagle3Head
from specjax.proposers.trunk import FeatureHead
from specjax.types import Array, Features, Model, ModelInput, PyTree
from specjax.validation import check_number, is_integer

BLOCK = 256  # queries whose scores exist at a time
LEAST_KEPT = 0.2  # share of the tokens after which the deepest rows of `depth_unroll` stand, at least


class Batch(NamedTuple):
    """Documents to train on, several of them in a row where they are short."""

    tokens: Array  # [B, L] int32
    segments: Array | None  # [B, L] int32, the document of each token from 1 on, 0 for padding; None: a row is one
    loss_mask: Array  # [B, L] bool, the tokens that the drafter learns to predict
    features: Any = None  # `Features` of the target, of every token; None before `features` was called


class Steps(NamedTuple):
    """Outputs of unrolled steps, and their labels. An output of step j that begins at token s predicts token s + 1 + j.

    In `feature_unroll` and `medusa_unroll`, N = L and output s begins at token s.
    """

    outputs: tuple[Array, ...]  # of each step [B, N, h], input of the drafter's head, or of its norm
    labels: tuple[Array, ...]  # of each step [B, N] int32, the token to predict
    masks: tuple[Array, ...]  # of each step [B, N] bool, the outputs that have a label to learn
    rows: tuple[Array, ...]  # of each step [B, N] int32, the token s at which each output begins
    previous: tuple[Array, ...]  # of each step [B, N] int32, the token before the label
    target_hidden: tuple[Array, ...]  # of each step [B, N, H], hidden state from which the target predicts the label


def features(target: Model, batch: Batch, feature_layers: Sequence[int] = ()) -> Batch:
    """Run the target over a batch and return the batch with its features, constants for any gradient.

    Args:
        target: a built-in model.
        batch: the documents. No token sees one of another document.
        feature_layers: layers of the residual stream that the drafter reads, as `models.with_feature_layers` takes
            them.

    Returns:
        The batch with `Features`.

    Raises:
        ValueError: a layer is out of range, or the target is not a built-in model.
    """
    model = models.with_feature_layers(target, feature_layers)
    mask = None
    if batch.segments is not None:
        is_before = jnp.tri(batch.tokens.shape[1], dtype=bool)[None]
        mask = is_before & (batch.segments[:, :, None] == batch.segments[:, None, :])
    output, _ = model.apply(model.params, ModelInput(batch.tokens, positions(batch), mask), None)
    return batch._replace(features=jax.lax.stop_gradient(output.features))


def positions(batch: Batch) -> Array:
    """Return the place of each token in its document, [B, L] int32."""
    index = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
    if batch.segments is None:
        return index
    before = jnp.pad(batch.segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return index - jax.lax.cummax(jnp.where(batch.segments != before, index, 0), axis=1)


def shift(x: Array, count: int) -> Array:
    """Move x [B, L, ...] so that row s holds the old row s + count, and zeros past the end (or before row 0)."""
    size = x.shape[1]
    padding = ((0, 0), (max(-count, 0), max(count, 0)), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding)[:, max(count, 0) : max(count, 0) + size]


def learned(batch: Batch, count: int) -> Array:
    """Return the rows [B, L] whose document has a token `count` rows later that the drafter learns to predict."""
    mask = shift(batch.loss_mask, count)
    if batch.segments is None:
        return mask
    return mask & (shift(batch.segments, count) == batch.segments) & (batch.segments > 0)


def feature_unroll(head: FeatureHead, params: PyTree, batch: Batch, *, steps: int = 7, detach: bool = False) -> Steps:
    """Run the head of a feature drafter as it will decode, some steps ahead from every row at once.

    Step 0 reads the target's features. Step j reads the output of step j - 1 for the same row, and the token of the
    text j places later. So it equals `FeatureDraft.propose` after drafts that are the text's tokens: it sees the rows
    of step 0 up to its own and its own row of steps 1 to j. Gradients flow through all steps.

    Args:
        head: the head, such as `proposers.eagle3.Eagle3Head`; one that derives from `proposers.trunk.FeatureHead`.
        params: its parameters, as the proposer holds them.
        batch: with features.
        steps: J >= 1.
        detach: whether no gradient flows from a step to the one before.

    Returns:
        J steps of N = L outputs; `head.logits(params, output)` gives logits. The first row of a document has no
        feature, and its mask is false.

    Raises:
        ValueError: the batch has no features, or not the features of the head; or `steps` is not an integer >= 1.

    References:
        Li et al., EAGLE-3, NeurIPS 2025: training-time test.
    """
    _check_count("steps", steps)
    feature, layers = _first_step(head, params, batch)
    place = positions(batch)
    run = jax.checkpoint(head.run)
    outputs = []
    for j in range(steps):
        if j:
            feature = head.recurrent(params, jax.lax.stop_gradient(outputs[-1]) if detach else outputs[-1])
        output, layers = run(params, ModelInput(shift(batch.tokens, j), place + j), feature, layers)
        outputs.append(output)
    return _steps(batch, outputs, [_all_rows(batch)] * steps)


def depth_unroll(
    key: Array, head: Eagle3Head, params: PyTree, batch: Batch, *, mask_token: int, depths: int, keep: float = 0.7
) -> Steps:
    """Run a head of P-EAGLE from every row at once, and over rows of the mask token after some of them.

    Depth 0 is step 0 of `feature_unroll`. A row of depth d is made of the mask token, d places after the token where
    it begins. It sees the rows of depth 0 up to that token and the rows of depths 1 to d which begin there, so it
    computes the same numbers as `ParallelEagle.propose`.

    Args:
        key: a typed key, which chooses the tokens at which rows of the mask token begin.
        head: the head.
        params: its parameters, as the proposer holds them.
        batch: with features.
        mask_token: the id of the mask token in the embedding.
        depths: J >= 1, the drafts of a step.
        keep: in [0, 1]: rows of depth d begin at a share keep^d of the tokens, or 0.2 if that is more, at random. The
            rows of a depth are among the rows of the depth before.

    Returns:
        J steps, of N = L outputs and then of fewer; `head.logits(params, output)` gives logits.

    Raises:
        ValueError: the batch has no features, or not the features of the head; or a number is out of its range.

    References:
        P-EAGLE: Parallel-Drafting EAGLE with Scalable Training, 2026.
    """
    _check_count("depths", depths)
    check_number("keep", keep, "one number in [0, 1]", 0, 1)
    feature, layers = _first_step(head, params, batch)
    place = positions(batch)
    run = jax.checkpoint(head.run)
    output, layers = run(params, ModelInput(batch.tokens, place), feature, layers)
    outputs, rows = [output], [_all_rows(batch)]
    is_valid = learned(batch, 2) & (place > 0)
    order = jnp.argsort(jnp.where(is_valid, jax.random.uniform(key, is_valid.shape), 2.0), axis=1).astype(jnp.int32)
    layers = [layer._replace(begins=order) for layer in layers]
    for depth in range(1, depths):
        count = math.ceil(batch.tokens.shape[1] * max(keep**depth, LEAST_KEPT))
        rows.append(order[:, :count])
        tokens = jnp.full_like(rows[-1], mask_token)
        masked = head.fuse(params, params["mask_taps"][None, None])
        masked = jnp.broadcast_to(masked, (*tokens.shape, masked.shape[-1]))
        output, layers = run(params, ModelInput(tokens, _take(place, rows[-1]) + depth), masked, layers)
        outputs.append(output)
    return _steps(batch, outputs, rows)


def medusa_unroll(heads: Sequence[PyTree], batch: Batch) -> Steps:
    """Return the steps of Medusa heads: they read the target's last hidden state, labels one token further ahead each.

    Args:
        heads: parameters of the heads, as the proposer holds them.
        batch: with features.

    Returns:
        A step of N = L outputs for each head. Output s is the feature of token s - 1;
        `proposers.medusa.head_logits(heads[j], output)` gives logits.

    Raises:
        ValueError: the batch has no features.
    """
    hidden = shift(_features_of(batch).hidden, -1)
    return _steps(batch, [hidden] * len(heads), [_all_rows(batch)] * len(heads))


def anchors(key: Array, batch: Batch, *, count: int) -> Array:
    """Choose tokens at random after which blocks begin: tokens with a feature before and a token to learn after them.

    Args:
        key: a typed key.
        batch: the documents.
        count: the most anchors of a row.

    Returns:
        [B, count] int32, different tokens of each row in increasing order, then -1 where it has no more.
    """
    is_valid = learned(batch, 1) & (positions(batch) > 0)
    length = is_valid.shape[1]
    order = jnp.where(is_valid, jax.random.uniform(key, is_valid.shape), 2.0)
    chosen = jnp.argsort(order, axis=1)[:, :count].astype(jnp.int32)
    chosen = jnp.sort(jnp.where(_take(is_valid, chosen), chosen, length), axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, count - chosen.shape[1])), constant_values=length)
    return jnp.where(chosen < length, chosen, -1)


def block_unroll(head: BlockHead, params: PyTree, batch: Batch, anchors: Array) -> Steps:
    """Run the network of a block drafter at once from many tokens of each row, as it decodes from one.

    The block of anchor a is token a and mask tokens, at the positions from a on. It sees the features of the tokens of
    its document before a, and itself.

    Args:
        head: the network of DFlash or DSpark.
        params: its parameters, as the proposer holds them.
        batch: with features.
        anchors: [B, N] int32, -1 for none.

    Returns:
        J = `head.most_drafts` steps of N outputs, step k with the rows of draft k; `head.logits(params,
        output)` gives logits, to which `head.markov_logits(params, previous)` adds the logits by the token before a
        draft. The masks end where the document or the learned tokens end.

    Raises:
        ValueError: the batch has no features, or not the features of the head, or the head has convolutions.
    """
    features = _features_of(batch)
    if head.conv_taps:  # they would have to begin anew in each block
        raise ValueError(f"head.conv_taps must be 0 in training, got {head.conv_taps}")
    batch_size, length = batch.tokens.shape
    count, width = anchors.shape[1], head.block_size
    start = jnp.maximum(anchors, 0)
    place = positions(batch)
    context = head.init_cache(batch_size, length, params["embedding"].dtype)
    context = head.write_features(params, features, ModelInput(batch.tokens, place), context)
    layers = [
        Blocks(batch.segments, start, one["key"], one["value"], head, window)
        for one, window in zip(context, head.config.windows, strict=True)
    ]
    tokens = jnp.full((batch_size, count, width), head.mask_token, jnp.int32)
    tokens = tokens.at[:, :, 0].set(_take(batch.tokens, start))
    at = _take(place, start)[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    flat = batch_size, count * width
    output, _ = head.run(params, ModelInput(tokens.reshape(flat), at.reshape(flat)), layers)
    output = output.reshape(batch_size, count, width, -1)[:, :, head.block_shift :]

    steps = _steps(batch, [output[:, :, k] for k in range(head.most_drafts)], [start] * head.most_drafts)
    reached, masks = anchors >= 0, []
    for mask in steps.masks:
        reached &= mask
        masks.append(reached)
    return steps._replace(masks=tuple(masks))


def _check_count(name: str, count: int) -> None:
    if not is_integer(count) or count < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {count!r}")


def _features_of(batch: Batch) -> Features:
    if not isinstance(batch.features, Features):
        raise ValueError("batch must have features, which training.features adds, got None")
    return batch.features


def _first_step(head: FeatureHead, params: PyTree, batch: Batch) -> tuple[Array, list["Rows"]]:
    """Return the features of the first step, and an attention record in place of each layer's cache."""
    feature = head.feature(params, jax.tree.map(partial(shift, count=-1), _features_of(batch)))
    return feature, [Rows(batch.segments, positions(batch) > 0, (), ()) for _ in params["layers"]]


def _all_rows(batch: Batch) -> Array:
    return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)


def _take(x: Array, index: Array) -> Array:
    """Return x [B, L] at index [B, N]."""
    return jnp.take_along_axis(x, index, axis=1)


def _steps(batch: Batch, outputs: Sequence[Array], rows: Sequence[Array]) -> Steps:
    """Return the steps with these outputs [B, N, h], which begin at the tokens rows [B, N]."""
    has_feature, hidden = positions(batch) > 0, _features_of(batch).hidden
    labels, masks, previous, target_hidden = [], [], [], []
    for j, row in enumerate(rows):
        labels.append(_take(shift(batch.tokens, j + 1), row))
        masks.append(_take(learned(batch, j + 1) & has_feature, row))
        previous.append(_take(shift(batch.tokens, j), row))
        target_hidden.append(jnp.take_along_axis(shift(hidden, j), row[..., None], axis=1))
    columns = outputs, labels, masks, rows, previous, target_hidden
    return Steps(*(tuple(column) for column in columns))


def _check_scores(scale: float | None, softcap: float | None, sinks: Array | None) -> None:
    """Raise ValueError where the scores of a layer differ from the scores that losses compute."""
    if sinks is not None:
        raise ValueError("the attention of a head must have no sinks in training")
    if (scale, softcap) != (None, None):
        raise ValueError(f"the attention of a head must have no scale and no softcap in training, got {scale, softcap}")


class Rows(NamedTuple):
    """Keys and values of one layer, to which it attends: of step 0, then of later steps."""

    segments: Array | None  # [B, L] int32
    is_seen: Array  # [B, L] bool, whether other rows see a row of step 0
    keys: tuple[Array, ...]  # of each step [B, N, kv heads, head size]
    values: tuple[Array, ...]
    begins: Array | None = None  # [B, L] int32, where rows of later steps begin, the first N in a step; None: in order

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, "Rows"]:
        """Add the keys and values of a step, and attend from its queries [B, N, heads, head size]."""
        _check_scores(scale, softcap, sinks)
        query, key = placed(query, key, turns, norms)
        rows = self._replace(keys=(*self.keys, key), values=(*self.values, value))
        return rows._attend(query), rows

    def _attend(self, query: Array) -> Array:
        """Attend to the rows of step 0 up to where a query begins, and to the rows of later steps that begin there."""
        batch_size, num_rows, num_heads, size = query.shape
        block = min(BLOCK, num_rows)
        num_blocks = -(-num_rows // block)
        if self.begins is None or len(self.keys) == 1:
            row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[None], (batch_size, num_rows))
        else:
            row = self.begins[:, :num_rows]
        own = [x[:, :num_rows] for x in (*self.keys[1:], *self.values[1:])]
        of_query = (query, row, *own)
        if num_blocks == 1:
            return self._attend_block(of_query)

        def blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, num_blocks * block - num_rows), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(batch_size, num_blocks, block, *x.shape[2:]), 1, 0)

        attended = jax.lax.map(jax.checkpoint(self._attend_block), jax.tree.map(blocks, of_query))
        return jnp.moveaxis(attended, 0, 1).reshape(batch_size, -1, num_heads, size)[:, :num_rows]

    def _attend_block(self, of_query: tuple[Array, ...]) -> Array:
        """Attend from queries [B, T, heads, head size] with their rows [B, T] and their own keys and values."""
        query, row, *own = of_query
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        batch_size, num_queries, _, size = query.shape
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        grouped = query.reshape(batch_size, num_queries, self.keys[0].shape[2], -1, size)
        scores = jnp.einsum("btkgd,bskd->btkgs", grouped, self.keys[0], preferred_element_type=dtype)
        scores = jnp.where(self._sees(row)[:, :, None, None], scores, jnp.finfo(dtype).min)
        to_own = [jnp.einsum("btkgd,btkd->btkg", grouped, key, preferred_element_type=dtype) for key in keys]
        scores = jnp.concatenate([scores, *(x[..., None] for x in to_own)], axis=-1) / size**0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        length = self.keys[0].shape[1]
        attended = jnp.einsum("btkgs,bskd->btkgd", weights[..., :length], self.values[0])
        for j, value in enumerate(values):
            attended += weights[..., length + j, None] * value[:, :, :, None]
        return attended.reshape(query.shape)

    def _sees(self, row: Array) -> Array:
        """Return which rows of step 0 queries in the rows [B, T] see, [B, T, L] bool."""
        other = jnp.arange(self.is_seen.shape[1], dtype=jnp.int32)[None, None]
        seen = (other <= row[..., None]) & self.is_seen[:, None]
        if self.segments is not None:
            own = jnp.take_along_axis(self.segments, row, axis=1)
            seen &= own[..., None] == self.segments[:, None]
        return seen | (other == row[..., None])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["segments", "anchors", "key", "value"],
    meta_fields=["head", "window"],
)
@dataclass(frozen=True)
class Blocks:
    """Keys and values of the context of blocks in one layer, to which it attends."""

    segments: Array | None  # [B, L] int32
    anchors: Array  # [B, count] int32
    key: Array  # [B, L, kv heads, head size]
    value: Array
    head: BlockHead
    window: int | None  # of the layer

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, None]:
        """Attend from the tokens of all blocks [B, count * width, heads, head size]."""
        _check_scores(scale, softcap, sinks)
        query, key = placed(query, key, turns, norms)
        batch_size, _, num_heads, size = query.shape
        count, width = self.anchors.shape[1], self.head.block_size
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        key, value = (x.reshape(batch_size, count, width, *x.shape[2:]) for x in (key, value))
        grouped = query.reshape(batch_size, count, width, key.shape[3], -1, size)
        to_context = jnp.einsum("bctkgd,bskd->bctkgs", grouped, self.key, preferred_element_type=dtype)
        to_own = jnp.einsum("bctkgd,bcskd->bctkgs", grouped, key, preferred_element_type=dtype)
        of_context, of_own = self._sees(width)
        hidden = jnp.finfo(dtype).min
        scores = jnp.concatenate(
            [
                jnp.where(of_context[:, :, :, None, None], to_context, hidden),
                jnp.where(of_own[None, None, :, None, None], to_own, hidden),
            ],
            axis=-1,
        )
        weights = jax.nn.softmax(scores / size**0.5, axis=-1).astype(query.dtype)
        length = self.key.shape[1]
        attended = jnp.einsum("bctkgs,bskd->bctkgd", weights[..., :length], self.value)
        attended += jnp.einsum("bctkgs,bcskd->bctkgd", weights[..., length:], value)
        return attended.reshape(batch_size, -1, num_heads, size), None

    def _sees(self, width: int) -> tuple[Array, Array]:
        """Return the slots that tokens see: in the context [B, count, width, L] bool, in their block [width, width]."""
        other = jnp.arange(self.key.shape[1], dtype=jnp.int32)[None, None]
        seen = other < self.anchors[..., None]
        if self.segments is not None:
            own = jnp.take_along_axis(self.segments, self.anchors, axis=1)
            seen &= own[..., None] == self.segments[:, None]
        seen = jnp.repeat(seen[:, :, None], width, axis=2)
        if self.window is not None:
            # The window's last position, relative to the anchor.
            end = jnp.full(width, -1) if self.head.window_from_anchor else jnp.arange(width)
            end = self.anchors[..., None] + end.astype(jnp.int32)[None, None]
            seen &= other[:, :, None] > end[..., None] - self.window
        return seen, jnp.asarray(self.head.sees(width, self.window))
