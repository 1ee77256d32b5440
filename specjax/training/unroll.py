"""What a drafter computes on known text, for the losses: its steps, unrolled from every row at once.

Row s of a document is made of token s and of the target's feature of token s-1, as in decoding, and predicts token s+1.
Its target distribution is the one that the target has behind token s.

Shapes: B sequences, L tokens, H hidden size of the target, h of the drafter, J unrolled steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import models
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.feature_draft import Head
from specjax.types import Array, Features, Model, ModelInput, PyTree
from specjax.validation import is_integer

BLOCK = 256  # queries whose scores exist at a time


class Batch(NamedTuple):
    """Documents to train on, several of them in a row where they are short."""

    tokens: Array  # [B, L] int32
    segments: Array | None  # [B, L] int32, the document of each token from 1 on, 0 for padding; None: a row is one
    loss_mask: Array  # [B, L] bool, the tokens that the drafter learns to predict
    features: Any = None  # `Features` of the target, of every token; None before `features` was called


class Steps(NamedTuple):
    """What unrolled steps give. Row s of step j predicts token s + 1 + j, which the target predicts at row s + j."""

    outputs: tuple[Array, ...]  # of each step [B, L, h], what the drafter's head scores or norms first
    labels: tuple[Array, ...]  # of each step [B, L] int32, the tokens to predict
    masks: tuple[Array, ...]  # of each step [B, L] bool, the rows that have a label to learn


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
    batch_size, length = batch.tokens.shape
    mask = None
    if batch.segments is not None:
        is_before = jnp.tri(length, dtype=bool)[None]
        mask = is_before & (batch.segments[:, :, None] == batch.segments[:, None, :])
    inputs = ModelInput(batch.tokens, positions(batch), mask)
    output, _ = model.apply(model.params, inputs, model.init_cache(batch_size, length))
    return batch._replace(features=jax.lax.stop_gradient(output.features))


def positions(batch: Batch) -> Array:
    """Return the place of each token in its document, [B, L] int32."""
    index = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
    if batch.segments is None:
        return index
    before = jnp.pad(batch.segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return index - jax.lax.cummax(jnp.where(batch.segments != before, index, 0), axis=1)


def shift(x: Array, count: int) -> Array:
    """Move x [B, L, ...] so that row s holds what row s + count held, and zeros past the end (or before row 0)."""
    size = x.shape[1]
    padding = ((0, 0), (max(-count, 0), max(count, 0)), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding)[:, max(count, 0) : max(count, 0) + size]


def learned(batch: Batch, count: int) -> Array:
    """Return the rows [B, L] whose document has a token `count` rows later that the drafter learns to predict."""
    mask = shift(batch.loss_mask, count)
    if batch.segments is None:
        return mask
    return mask & (shift(batch.segments, count) == batch.segments) & (batch.segments > 0)


def feature_unroll(head: Head, params: PyTree, batch: Batch, *, steps: int = 7, detach: bool = False) -> Steps:
    """Run the head of a feature drafter as it will decode, some steps ahead from every row at once.

    Step 0 reads the target's features. Step j reads what step j - 1 made of the same row, and the text's own token j
    places later, so it computes what `FeatureDraft.propose` computes after drafts that were the text's tokens: it sees
    the rows of step 0 up to its own and its own row of steps 1 to j. Gradients flow through all steps.

    Args:
        head: the head, such as `proposers.eagle3.Eagle3Head`.
        params: its parameters, as the proposer holds them.
        batch: with features.
        steps: J >= 1.
        detach: whether no gradient flows from a step to the one before.

    Returns:
        The outputs, labels and masks of all steps; `head.logits(params, output)` gives logits. The first row of a
        document has no feature, and its mask is false.

    Raises:
        ValueError: the batch has no features, or not those of the head; or `steps` is not an integer >= 1.

    References:
        Li et al., EAGLE-3, NeurIPS 2025: training-time test.
    """
    if not is_integer(steps) or steps < 1:
        raise ValueError(f"steps must be an integer >= 1, got {steps!r}")
    if batch.features is None:
        raise ValueError("batch must have features, which training.features adds, got None")
    place = positions(batch)
    has_feature = place > 0
    layers = [Rows(batch.segments, has_feature, (), ()) for _ in params["layers"]]
    feature = head.feature(params, jax.tree.map(partial(shift, count=-1), batch.features))

    @jax.checkpoint
    def step(params: PyTree, tokens: Array, place: Array, feature: Array, layers: list["Rows"]):
        return head(params, ModelInput(tokens, place), feature, layers)

    outputs = []
    for j in range(steps):
        if j:
            feature = head.recurrent(params, jax.lax.stop_gradient(outputs[-1]) if detach else outputs[-1])
        output, layers = step(params, shift(batch.tokens, j), place + j, feature, layers)
        outputs.append(output)
    labels = tuple(shift(batch.tokens, j + 1) for j in range(steps))
    masks = tuple(learned(batch, j + 1) & has_feature for j in range(steps))
    return Steps(tuple(outputs), labels, masks)


def medusa_unroll(heads: Sequence[PyTree], batch: Batch) -> Steps:
    """Return what Medusa heads score: all the target's own last hidden state, one token further ahead each.

    Args:
        heads: parameters of the heads, as the proposer holds them.
        batch: with features.

    Returns:
        Outputs, labels and masks as those of `feature_unroll`. Row s reads the feature of token s - 1, and head j
        predicts token s + 1 + j; `proposers.medusa.head_logits(heads[j], output)` gives logits.

    Raises:
        ValueError: the batch has no features.
    """
    if not isinstance(batch.features, Features):
        raise ValueError("batch must have features, which training.features adds, got None")
    hidden = shift(batch.features.hidden, -1)
    has_feature, count = positions(batch) > 0, len(heads)
    labels = tuple(shift(batch.tokens, j + 1) for j in range(count))
    masks = tuple(learned(batch, j + 1) & has_feature for j in range(count))
    return Steps((hidden,) * count, labels, masks)


def anchors(key: Array, batch: Batch, *, count: int) -> Array:
    """Choose tokens at random behind which blocks begin: those with a feature before and a token to learn behind them.

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
    chosen = jnp.sort(jnp.where(jnp.take_along_axis(is_valid, chosen, axis=1), chosen, length), axis=1)
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
        anchors: [B, count] int32, -1 for none.

    Returns:
        K = `head.most_drafts` steps, whose fields are [B, count, ...]: step k of anchor a predicts token a + 1 + k,
        which the target predicts at row a + k; `head.logits(params, output)` gives logits. The masks end where the
        document or what the drafter learns does.

    Raises:
        ValueError: the batch has no features, or not those of the head, or the head has convolutions.
    """
    if batch.features is None:
        raise ValueError("batch must have features, which training.features adds, got None")
    if head.conv_taps:  # they would have to begin anew in each block
        raise ValueError(f"head.conv_taps must be 0 in training, got {head.conv_taps}")
    batch_size, length = batch.tokens.shape
    count, width = anchors.shape[1], head.block_size
    start = jnp.maximum(anchors, 0)
    place = positions(batch)
    inputs = ModelInput(batch.tokens, place)
    context = head.init_cache(batch_size, length, params["embedding"].dtype)
    context = head.write_features(params, batch.features, inputs, context)
    windows = head.config.windows or (None,) * head.config.num_layers
    layers = [
        Blocks(batch.segments, start, one["key"], one["value"], width, window, head.sees_causally(window))
        for one, window in zip(context, windows, strict=True)
    ]
    tokens = jnp.full((batch_size, count, width), head.mask_token, jnp.int32)
    tokens = tokens.at[:, :, 0].set(jnp.take_along_axis(batch.tokens, start, axis=1))
    at = jnp.take_along_axis(place, start, axis=1)[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    flat = batch_size, count * width
    output, _ = head.run_block(params, ModelInput(tokens.reshape(flat), at.reshape(flat)), layers)
    output = output.reshape(batch_size, count, width, -1)[:, :, head.block_shift :]

    outputs, labels, masks = [], [], []
    valid = (anchors >= 0) & jnp.take_along_axis(place > 0, start, axis=1)
    for k in range(head.most_drafts):
        valid &= jnp.take_along_axis(learned(batch, k + 1), start, axis=1)
        outputs.append(output[:, :, k])
        labels.append(jnp.take_along_axis(shift(batch.tokens, k + 1), start, axis=1))
        masks.append(valid)
    return Steps(tuple(outputs), tuple(labels), tuple(masks))


class Rows(NamedTuple):
    """Keys and values of one layer, which stand where its cache does: those of step 0, then those of later steps."""

    segments: Array | None  # [B, L] int32
    is_seen: Array  # [B, L] bool, whether other rows see a row of step 0
    keys: tuple[Array, ...]  # of each step [B, L, kv heads, head size]
    values: tuple[Array, ...]

    def attend(self, query: Array, key: Array, value: Array) -> tuple[Array, "Rows"]:
        """Add the keys and values of a step, and attend from its queries [B, L, heads, head size]."""
        rows = self._replace(keys=(*self.keys, key), values=(*self.values, value))
        return rows._attend(query), rows

    def _attend(self, query: Array) -> Array:
        """Attend to the rows of step 0 up to the query's own, and to its own row of the later steps."""
        batch_size, length, num_heads, size = query.shape
        block = min(BLOCK, length)
        num_blocks = -(-length // block)
        row = jnp.arange(length, dtype=jnp.int32)[None]
        of_query = (query, jnp.broadcast_to(row, (batch_size, length)), *self.keys[1:], *self.values[1:])
        if num_blocks == 1:
            return self._attend_block(of_query)

        def blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, num_blocks * block - length), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(batch_size, num_blocks, block, *x.shape[2:]), 1, 0)

        attended = jax.lax.map(jax.checkpoint(self._attend_block), jax.tree.map(blocks, of_query))
        return jnp.moveaxis(attended, 0, 1).reshape(batch_size, -1, num_heads, size)[:, :length]

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


class Blocks(NamedTuple):
    """What blocks see in one layer: keys and values of the context, which stand where the layer's cache does."""

    segments: Array | None  # [B, L] int32
    anchors: Array  # [B, count] int32
    key: Array  # [B, L, kv heads, head size]
    value: Array
    width: int  # tokens of a block
    window: int | None  # number of positions that a token sees, its own included
    is_causal: bool  # whether a token of a block sees none of the block behind it

    def attend(self, query: Array, key: Array, value: Array) -> tuple[Array, "Blocks"]:
        """Attend from the tokens of all blocks [B, count * width, heads, head size]."""
        batch_size, _, num_heads, size = query.shape
        count, width = self.anchors.shape[1], self.width
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        key, value = (x.reshape(batch_size, count, width, *x.shape[2:]) for x in (key, value))
        grouped = query.reshape(batch_size, count, width, key.shape[3], -1, size)
        to_context = jnp.einsum("bctkgd,bskd->bctkgs", grouped, self.key, preferred_element_type=dtype)
        to_own = jnp.einsum("bctkgd,bcskd->bctkgs", grouped, key, preferred_element_type=dtype)
        of_context, of_own = self._sees()
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
        return attended.reshape(batch_size, -1, num_heads, size), self

    def _sees(self) -> tuple[Array, Array]:
        """Return what tokens see of the context, [B, count, width, L] bool, and of their block, [width, width]."""
        other = jnp.arange(self.key.shape[1], dtype=jnp.int32)[None, None]
        place = jnp.arange(self.width, dtype=jnp.int32)
        seen = other < self.anchors[..., None]
        if self.segments is not None:
            own = jnp.take_along_axis(self.segments, self.anchors, axis=1)
            seen &= own[..., None] == self.segments[:, None]
        behind = place[:, None] - place[None]
        of_own = behind >= 0 if self.is_causal else jnp.ones_like(behind, bool)
        seen = jnp.repeat(seen[:, :, None], self.width, axis=2)
        if self.window is not None:
            distance = (self.anchors[..., None] + place[None, None])[..., None] - other[:, :, None]
            seen, of_own = seen & (distance < self.window), of_own & (behind < self.window)
        return seen, of_own
