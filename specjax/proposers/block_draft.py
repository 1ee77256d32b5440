"""Drafters that make all drafts in one pass: a block of mask tokens which attends to features of the target.

The cache holds keys and values of the target's features, token s in slot s, at the token's own position. The block
stands after them, from the pending token on, and its own keys and values are overwritten by the next features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.decoding.drafters import check_draft_length
from specjax.models.attention import KeyValues, memories, update_cache
from specjax.models.layer import matrix_shape
from specjax.models.linear import linear, lookup, rms_norm
from specjax.models.rope import rotation
from specjax.operations.pieces import by_tile, in_tiles
from specjax.operations.top_k import top_k
from specjax.proposers import trunk
from specjax.proposers.convolution import Convolutions
from specjax.proposers.drawing import Drawer, Reduced, drawer_of, last_token, only_in
from specjax.proposers.feature_draft import has_feature
from specjax.proposers.files import check_depth
from specjax.proposers.none import Paused
from specjax.proposers.tree_drawing import InTrees, TreeDrawer, only_root, tree_drawer_of
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, DraftTree, Memory, ModelInput, PyTree, Verified

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class BlockHead:
    """Sizes and options of the network of DFlash, which DSpark and DFlash2 share.

    Where `from_anchor` is true, the row of the pending token gives the first draft, and each mask token the draft after
    its place. Elsewhere each mask token gives the draft at its own place, and the first row is not used.
    """

    config: "DecoderConfig"  # num_layers and windows belong to the drafter, vocab_size is D
    num_taps: int  # layers of the target whose stream it reads
    target_size: int  # H of the target
    target_vocab: int  # V of the target
    block_size: int  # tokens of a block in training
    mask_token: int  # id in the target's vocabulary
    from_anchor: bool = False
    is_causal: bool | None = None  # whether the tokens of a block see none after them; None: in layers with a window
    window_from_anchor: bool = False  # whether all tokens of a block see the same window: the positions before them all
    markov_rank: int = 0  # numbers by which the token before a draft changes its logits
    confidence: str | None = None  # input of the confidence: "hidden", or "both": hidden state and token before
    conv_taps: int = 0  # tokens that the convolutions around attention and MLP read; 0: there are none
    conv_group: int = 16  # channels that share the token's part of a convolution's weights
    num_candidates: int = 0  # tokens of each row among which the draft is chosen; 0 is all
    selector_rank: int = 0  # numbers by which the token before a draft and its row change the logits of candidates

    @property
    def layers(self) -> "DecoderConfig":
        """The config with the convolutions that its layers have."""
        if not self.conv_taps:
            return self.config
        around = Convolutions(self.conv_taps, self.conv_group)
        return replace(self.config, layers=tuple(replace(layer, around=around) for layer in self.config.layers))

    @property
    def most_drafts(self) -> int:
        """The trained depth."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def block_shift(self) -> int:
        """Number of rows of a block before the first that gives a draft."""
        return 0 if self.from_anchor else 1

    def sees_causally(self, window: int | None) -> bool:
        """Return whether tokens of a block see none after them, in a layer with this window."""
        return window is not None if self.is_causal is None else self.is_causal

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the parameters, but for `embedding` [V, h] and `lm_head` [D, h]."""
        config, hidden, rank = self.config, self.config.hidden_size, self.markov_rank
        shapes: dict[str, Any] = {
            "fc": matrix_shape(config, self.num_taps * self.target_size, hidden),
            "hidden_norm": (hidden,),
            "layers": trunk.layer_shapes(self.layers),
            "norm": (hidden,),
        }
        if rank:
            shapes |= {"markov_in": (self.target_vocab, rank), "markov_out": (config.vocab_size, rank)}
        if self.confidence is not None:
            shapes |= {"confidence": (hidden + (rank if self.confidence == "both" else 0),), "confidence_bias": (1,)}
        if self.num_candidates:
            shapes |= {name: (self.target_vocab, self.selector_rank) for name in ("selector_in", "selector_out")}
            shapes["selector_hidden"] = (self.selector_rank, hidden)
        return shapes

    def init_cache(self, num_pages: int, page_size: int, dtype: DTypeLike) -> list:
        return trunk.init_cache(self.config, num_pages, page_size, dtype)

    def write_features(self, params: PyTree, features: Any, inputs: ModelInput, cache: list) -> list:
        """Write keys and values of the target's features [B, T, ...] to the slots of their tokens."""
        config = self.config
        taps = trunk.taps_of(features, self.num_taps, self.target_size)
        turns = rotation(inputs.positions, config.head_size, config.rope_theta, config.rope_scaling)
        with trunk.in_full_precision(params):
            combined = linear(taps, params["fc"], transposed=config.transposed)
            combined = rms_norm(combined, (params["hidden_norm"], config.norm_eps))
            new = [
                layer.mixer.keys_values(config, params["layers"][i], combined, turns)
                for i, layer in enumerate(config.each_layer)
            ]
            if inputs.pieces is not None:
                inputs = by_tile(inputs)
                new = in_tiles(inputs, new)
            return [update_cache(one, *each, inputs=inputs) for one, each in zip(cache, new, strict=True)]

    def run_block(self, params: PyTree, inputs: ModelInput, cache: list) -> tuple[Array, list]:
        """Return the normalised output [B, T, h] of every token of a block, and the cache."""
        of_window = {
            window: memories(self._block(inputs, window), cache, [self._cache_window(window)] * len(cache))
            for window in dict.fromkeys(self.config.windows)
        }
        return self.run(params, inputs, [of_window[window][i] for i, window in enumerate(self.config.windows)])

    def run(self, params: PyTree, inputs: ModelInput, memories: Sequence[KeyValues]) -> tuple[Array, list]:
        """Return the result of `run_block`, given the keys and values of each layer."""
        with trunk.in_full_precision(params):
            x = lookup(params["embedding"], inputs.tokens)
            x, kept = trunk.run_layers(self.layers, params["layers"], x, inputs, memories)
            return rms_norm(x, (params["norm"], self.config.norm_eps)), kept

    def sees(self, width: int, window: int | None) -> np.ndarray:
        """Return which tokens of a block each of them sees, [T, T] bool, in a layer with this window."""
        place = np.arange(width)
        after = place[:, None] - place[None]
        seen = after >= 0 if self.sees_causally(window) else np.ones_like(after, bool)
        return seen if window is None or self.window_from_anchor else seen & (np.abs(after) < window)

    def _cache_window(self, window: int | None) -> int | None:
        """Return the window of the tokens that `_block` returns, in the cache of a layer with this window."""
        # The place of the pending token takes one position of the window itself.
        return window + 1 if window is not None and self.window_from_anchor else window

    def _block(self, inputs: ModelInput, window: int | None) -> ModelInput:
        """Return the tokens of a block as they see each other and the cache, in a layer with this window."""
        is_anchored = window is not None and self.window_from_anchor
        if self.sees_causally(window) and not is_anchored:
            return inputs
        shape = inputs.tokens.shape
        mask = jnp.broadcast_to(self.sees(shape[1], window), (*shape, shape[1]))
        if not is_anchored:
            return inputs._replace(mask=mask)
        # The tokens are siblings at the place of the first one.
        return inputs._replace(mask=mask, positions=jnp.broadcast_to(inputs.positions[:, :1], shape))

    def logits(self, params: PyTree, output: Array) -> Array:
        """Return logits [B, T, D] float32, without the part that the token before each draft adds."""
        return trunk.logits(params, output)

    def markov_logits(self, params: PyTree, token: Array) -> Array:
        """Return the logits that the token before a draft [B, T] adds, [B, T, D] float32."""
        with trunk.in_full_precision(params):
            return linear(lookup(params["markov_in"], token), params["markov_out"], transposed=True, dtype=jnp.float32)

    def select(self, params: PyTree, output: Array, token: Array, candidates: tuple[Array, Array]) -> Array:
        """Return the logits of a draft [B, 1, V] float32, -inf for all but the candidates.

        Args:
            params: the parameters.
            output: [B, 1, h], of the draft's row.
            token: [B, 1] int32, the one before the draft.
            candidates: logits [B, 1, C] and ids [B, 1, C] of the best tokens of the row.
        """
        values, ids = candidates
        with trunk.in_full_precision(params):
            context = lookup(params["selector_in"], token) * linear(output, params["selector_hidden"], transposed=True)
            context = context.astype(jnp.float32)[:, :, None]
            values = values + jnp.sum(context * lookup(params["selector_out"], ids).astype(jnp.float32), axis=-1)
        wide = jnp.full((len(values), 1, self.target_vocab), -jnp.inf, jnp.float32)
        return jnp.put_along_axis(wide, ids, values, axis=-1, inplace=False)

    def confidences(self, params: PyTree, output: Array, token: Array) -> Array:
        """Return the probability with which each draft is expected to be accepted, [B, T] float32.

        It depends on the output of its row and on the token before it, and not on the draft.
        """
        return jax.nn.sigmoid(self.confidence_logits(params, output, token))

    def confidence_logits(self, params: PyTree, output: Array, token: Array) -> Array:
        """Return the log-odds of `confidences`, [B, T] float32."""
        parts = [output] if self.confidence == "hidden" else [output, lookup(params["markov_in"], token)]
        read = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
        with trunk.in_full_precision(params):
            score = jnp.sum(read * params["confidence"].astype(jnp.float32)[None, None], axis=-1)
        return score + params["confidence_bias"].astype(jnp.float32)[None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "reduced", "temperature", "min_confidence"],
    meta_fields=["head", "num_draft_tokens", "is_greedy", "tree", "coupled"],
)
@dataclass(frozen=True)
class BlockDraft(InTrees):
    """A proposer that runs its network once for all drafts of a step.

    With `min_confidence`, the drafts of a row end before the first one with less confidence.
    """

    head: BlockHead
    params: PyTree
    num_draft_tokens: int
    reduced: Reduced | None = None
    temperature: Array | None = None  # [] or [B] float32
    min_confidence: Array | None = None  # [] float32
    is_greedy: bool = False
    tree: int | None = None  # N, the number of nodes; None makes a chain
    coupled: bool = False
    takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "BlockDraft | Paused":
        check_draft_length(num_draft_tokens, self.head.most_drafts)
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else Paused(self)

    def with_tree(self, tree: int | None, *, coupled: bool) -> "BlockDraft":
        if tree is not None and self.head.num_candidates:
            raise ValueError(
                f"tree must be None for a drafter of DFlash2, which chooses each draft of a chain among "
                f"{self.head.num_candidates} candidates, got {tree!r}"
            )
        if tree is not None and self.min_confidence is not None:
            raise ValueError(f"min_confidence must be None for trees, because it ends chains, got {tree = !r}")
        return super().with_tree(tree, coupled=coupled)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory(self.head.init_cache(num_pages, page_size, self.params["embedding"].dtype))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return Memory(self.head.write_features(self.params, features, inputs, state.pools))

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory
    ) -> tuple[Draft | DraftTree, Memory]:
        head, width = self.head, self.num_draft_tokens + self.head.block_shift
        pending = last_token(context)
        masks = jnp.full((pending.shape[0], width - 1), head.mask_token, jnp.int32)
        positions = jnp.maximum(context.length - 1, 0)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        block = ModelInput(jnp.concatenate([pending, masks], axis=1), positions, pages=context.pages)
        output, pools = head.run_block(self.params, block, state.pools)
        if self.tree is not None:
            drawer = tree_drawer_of(self, keys, context, sampling, self.reduced)
            tree = self._grow(drawer, output[:, head.block_shift :], pending)
            return only_root(has_feature(context), tree), Memory(pools)
        drawer = drawer_of(self, keys, context, sampling, self.reduced, is_partial=head.num_candidates > 0)
        draft = self._draw(drawer, output[:, head.block_shift :], pending)
        return only_in(has_feature(context), draft), Memory(pools)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        index = jnp.arange(verified.tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.maximum(context.length - 1, 0)[:, None] + index
        inputs = ModelInput(verified.tokens, positions, pages=context.pages)
        return Memory(self.head.write_features(self.params, features, inputs, state.pools))

    def _draw(self, drawer: Drawer, output: Array, pending: Array) -> Draft:
        """Draw the drafts of a block, given the output of their rows [B, K, h] and the pending token [B, 1]."""
        head, params = self.head, self.params
        logits = head.logits(params, output)
        if head.num_candidates:
            return self._choose(drawer, output, logits, pending)
        if not head.markov_rank:
            draft = drawer.parallel(logits)
            if self.min_confidence is None:
                return draft
            return self._cut(draft, head.confidences(params, output, pending))

        def row(token: Array, index: Array | int, confidences: Array) -> tuple[Array, Array]:
            own = jax.lax.dynamic_slice_in_dim(logits, index, 1, axis=1)
            if self.min_confidence is not None:
                of_row = jax.lax.dynamic_slice_in_dim(output, index, 1, axis=1)
                one = head.confidences(params, of_row, token)
                confidences = jax.lax.dynamic_update_slice_in_dim(confidences, one, index, axis=1)
            return own + head.markov_logits(params, token), confidences

        first, confidences = row(pending, 0, jnp.zeros(output.shape[:2], jnp.float32))
        draft, confidences = drawer.chain(first, row, confidences)
        return draft if self.min_confidence is None else self._cut(draft, confidences)

    def _grow(self, drawer: TreeDrawer, output: Array, pending: Array) -> DraftTree:
        """Draw the tree of a block, given the output of its rows [B, K, h] and the pending token [B, 1]."""
        logits = self.head.logits(self.params, output)
        if not self.head.markov_rank:
            return drawer.of_depths(logits)

        def advance(fed: DraftTree, num_new: int, depth: int) -> tuple[Array, int]:
            of_tokens = self.head.markov_logits(self.params, fed.tokens[:, -num_new:])
            return logits[:, depth : depth + 1] + of_tokens, depth + 1

        return drawer.grow(logits[:, :1] + self.head.markov_logits(self.params, pending), advance, 1)[0]

    def _choose(self, drawer: Drawer, output: Array, logits: Array, pending: Array) -> Draft:
        """Draw the drafts among the candidates of their rows, given the rows' logits [B, K, V]."""
        candidates = top_k(logits, self.head.num_candidates)

        def row(token: Array, index: Array | int, carry: tuple) -> tuple[Array, tuple]:
            own, of_row = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1), (candidates, output)
            )
            return self.head.select(self.params, of_row, token, own), carry

        return drawer.chain(row(pending, 0, ())[0], row, ())[0]

    def _cut(self, draft: Draft, confidences: Array) -> Draft:
        """End the drafts of each row before the first whose confidence [B, K] is too small.

        The confidence of a draft is known before the draft is drawn, so the output keeps its distribution.
        """
        assert self.min_confidence is not None, "there is something to compare with"
        count = jnp.sum(jnp.cumprod(confidences >= self.min_confidence, axis=1), axis=1).astype(jnp.int32)
        return draft._replace(num_tokens=count if draft.num_tokens is None else jnp.minimum(count, draft.num_tokens))


def check_block(head: BlockHead, params: PyTree, num_draft_tokens: int | None) -> int:
    """Return K, by default the trained depth.

    Raises:
        ValueError: K is out of its range, or the mask token has no embedding.
    """
    if not 0 <= head.mask_token < params["embedding"].shape[0]:
        size = params["embedding"].shape[0]
        raise ValueError(f"head.mask_token must be in the embedding, in [0, {size}), got {head.mask_token}")
    what = f"the trained depth of blocks of {head.block_size} tokens"
    return check_depth(num_draft_tokens, head.most_drafts, what)
