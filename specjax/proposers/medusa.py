"""Medusa: heads beside the target's own, each of which guesses one token further ahead from the same hidden state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafters import check_draft_length
from specjax.models.directory import Checkpoint
from specjax.models.linear import linear
from specjax.proposers import last_feature
from specjax.proposers.drawing import Reduced, draft_options, drawer_of, only_in
from specjax.proposers.feature_draft import has_feature
from specjax.proposers.files import check_depth, draft_vocabulary, expect, open_directory, refuse_unread, target_weights
from specjax.proposers.none import Paused
from specjax.proposers.tree_drawing import InTrees, in_tree, only_root, tree_drawer_of
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, DraftTree, Memory, Model, ModelInput, PyTree, Verified
from specjax.validation import check_array

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["heads", "reduced", "temperature"],
    meta_fields=["is_greedy", "tree", "coupled"],
)
@dataclass(frozen=True)
class Medusa(InTrees):
    """A proposer that draws draft i from head i, independently of the drafts before it."""

    heads: list[PyTree]  # for each draft: "blocks", a list of {"weight" [H, H], "bias" [H]}, and "head" [D, H]
    reduced: Reduced | None = None  # the vocabulary of the heads; None is the target's
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    tree: int | None = None  # N, the number of nodes; None makes a chain
    coupled: bool = False
    takes_groups = True

    @property
    def num_draft_tokens(self) -> int:
        return len(self.heads)

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "Medusa | Paused":
        check_draft_length(num_draft_tokens, len(self.heads))
        return replace(self, heads=self.heads[:num_draft_tokens]) if num_draft_tokens else Paused(self)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        head = self.heads[0]["head"]
        return Memory(rows=jnp.zeros((batch_size, head.shape[1]), head.dtype))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return last_feature.prefill(inputs, previous, features, state)

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory
    ) -> tuple[Draft | DraftTree, Memory]:
        hidden = state.rows[:, None]
        logits = jnp.concatenate([head_logits(head, hidden) for head in self.heads], axis=1)
        if self.tree is not None:
            tree = tree_drawer_of(self, keys, context, sampling, self.reduced).of_depths(logits)
            return only_root(has_feature(context), tree), state
        draft = drawer_of(self, keys, context, sampling, self.reduced).parallel(logits)
        return only_in(has_feature(context), draft), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return last_feature.update(context, verified, features, state)


def head_logits(head: PyTree, hidden: Array) -> Array:
    """Return the logits [B, T, D] float32 of one head, given hidden states [B, T, H]."""
    with jax.default_matmul_precision("highest" if hidden.dtype == jnp.float32 else None):
        for block in head["blocks"]:
            bias = block.get("bias")
            bias = None if bias is None else bias[None, None]
            hidden = hidden + jax.nn.silu(linear(hidden, block["weight"], transposed=True, residual=bias))
        return linear(hidden, head["head"], transposed=True, dtype=jnp.float32)


def medusa(
    heads: Sequence[PyTree],
    *,
    vocab_size: int,
    num_draft_tokens: int | None = None,
    token_ids: np.ndarray | None = None,
    temperature: float | Array | None = None,
    tree: int | None = None,
    coupled: bool = False,
) -> Medusa:
    """Draft with heads on the target's final hidden state, one for each draft.

    The target has been fed all tokens but the last, so its own head has already drawn this one, and head i (from 0)
    guesses the token i + 1 places after it: draft i. The target must return `Features`, as the built-in models do.

    Args:
        heads: for each head "blocks", a list of {"weight" [H, H], "bias" [H] (may be absent)}, each of which adds
            SiLU(weight x + bias) to x, and "head" [D, H], which makes the logits. Matrices are [outputs, inputs].
        vocab_size: V of the target.
        num_draft_tokens: K, how many of the heads to use; None is all.
        token_ids: [D] integers, the target's id of each token of the heads, where these have fewer than V.
        temperature: the temperature of drafts, as `draft_model` takes it.
        tree: number of nodes of a tree of drafts, as `draft_model` takes it.
        coupled: how the tree grows, as `draft_model` takes it.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: an array has a wrong shape, a number is out of its range, or there are fewer heads than drafts.

    Example:
        >>> import jax.numpy as jnp
        >>> from specjax import proposers
        >>> head = {"blocks": [{"weight": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}], "head": jnp.ones((10, 4))}
        >>> proposers.medusa([head, head], vocab_size=10).num_draft_tokens
        2

    References:
        Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024.
    """
    num_drafts = check_depth(num_draft_tokens, len(heads), "the number of heads")
    if not heads:
        raise ValueError("heads must hold at least one head, got none")
    size, hidden_size = jnp.shape(heads[0]["head"])
    for i, head in enumerate(heads):
        check_array(f"heads[{i}]['head']", head["head"], "[D, H]", (size, hidden_size), jnp.floating)
        for j, block in enumerate(head["blocks"]):
            name = f"heads[{i}]['blocks'][{j}]"
            check_array(f"{name}['weight']", block["weight"], "[H, H]", (hidden_size, hidden_size), jnp.floating)
            if block.get("bias") is not None:
                check_array(f"{name}['bias']", block["bias"], "[H]", (hidden_size,), jnp.floating)
    reduced = draft_vocabulary("token_ids", token_ids, size, vocab_size)
    temperature, is_greedy = draft_options(num_drafts, temperature)
    return in_tree(Medusa(list(heads[:num_drafts]), reduced, temperature, is_greedy), tree, coupled)


def is_medusa(names: list[str]) -> bool:
    """Return whether tensors of these names are Medusa heads."""
    found = {name.removeprefix("medusa_head.").removeprefix("medusa_heads.") for name in names}
    return not found.isdisjoint(("0.0.linear.weight", "blocks.0.layers.0.weight"))


def load_medusa(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Medusa:
    """Load the Medusa heads of a target.

    Three layouts are read: the authors' first one (medusa_lm_head.pt, or the same tensors in safetensors), their later
    one (a whole model with heads under `medusa_head.`), and vLLM's (`blocks.*`, `lm_heads.*`, `token_map`). The tensors
    tell the number of heads, because the config files of the first layout are known to be wrong about it.

    Args:
        directory: the checkpoint of the heads, or its directory.
        target: a built-in model.
        num_draft_tokens: K, at most the number of heads; None is that.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    config, tensors = open_directory(directory, target, fields)
    if any(name.startswith(("blocks.", "medusa_heads.blocks.")) for name in tensors.names()):
        heads, token_ids = _of_vllm(config, tensors, target)
    else:
        heads, token_ids = _of_authors(config, tensors, target)
    return medusa(
        heads,
        vocab_size=target.vocab_size,
        num_draft_tokens=num_draft_tokens,
        token_ids=token_ids,
        temperature=temperature,
    )


def _count(tensors: "Tensors", prefix: str) -> int:
    """Return how many numbers 0, 1, ... follow a prefix in the names of tensors."""
    names, count = tensors.names(), 0
    while any(name.startswith(f"{prefix}{count}.") for name in names):
        count += 1
    return count


def _of_authors(config: "ConfigFile", tensors: "Tensors", target: Model) -> tuple[list[PyTree], None]:
    """Read tensors `{head}.{block}.linear.weight` and `.bias`, and `{head}.{number of blocks}.weight`."""
    is_whole = any(name.startswith("medusa_head.") for name in tensors.names())
    prefix = "medusa_head." if is_whole else ""
    num_heads = _count(tensors, prefix)
    if not num_heads:
        raise ValueError(f"{config.path.parent} must hold Medusa heads, in tensors {prefix}0.*, got none")
    config.ignore("medusa_num_heads", "base_model_name_or_path")
    num_blocks = config.size("medusa_num_layers", 1, most=64)
    refuse_unread(config, "medusa_*")
    hidden_size = target_weights(target).hidden_size
    last = f"{prefix}0.{num_blocks}.weight"
    if last in tensors:
        whole = target.vocab_size, hidden_size
        expect(f"the shape of {last}", tensors.shape(last), whole, "the vocabulary and the hidden size of the target")

    def block(name: str) -> PyTree:
        weight = tensors.table(f"{name}.linear.weight", hidden_size, hidden_size)
        return {"weight": weight, "bias": tensors.vectors({f"{name}.linear.bias": hidden_size})}

    def head(name: str) -> PyTree:
        blocks = [block(f"{name}.{j}") for j in range(num_blocks)]
        return {"blocks": blocks, "head": tensors.table(f"{name}.{num_blocks}.weight", target.vocab_size, hidden_size)}

    heads = [head(f"{prefix}{i}") for i in range(num_heads)]
    tensors.check_all_read(*(("model.*", "lm_head.*") if is_whole else ()))
    return heads, None


def _of_vllm(config: "ConfigFile", tensors: "Tensors", target: Model) -> tuple[list[PyTree], np.ndarray | None]:
    """Read tensors `blocks.{head}.layers.{j}.weight`, `lm_heads.{head}.weight` and `token_map`."""
    prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in tensors.names()) else ""
    weights = target_weights(target)
    hidden_size = config.size("hidden_size")
    expect(config.where("hidden_size"), hidden_size, weights.hidden_size, "the hidden size of the target")
    expect(config.where("vocab_size"), config.size("vocab_size"), target.vocab_size, "the vocabulary of the target")
    num_heads, num_blocks = config.size("num_heads", most=64), config.size("num_hidden_layers", 1, most=64)
    has_bias, is_shared = (config.get(name, bool, False) for name in ("medusa_fc_bias", "original_lm_head"))
    config.only("logit_scale", 1.0)
    size = config.size("truncated_vocab_size", target.vocab_size, most=target.vocab_size)
    refuse_unread(config, "medusa_*", "*bias*", "*scale*", "*act*", "*norm*", "quant*")

    def block(name: str) -> PyTree:
        weight = tensors.table(f"{name}.weight", hidden_size, hidden_size)
        return {"weight": weight, "bias": tensors.vectors({f"{name}.bias": hidden_size}) if has_bias else None}

    one = f"{prefix}lm_head.weight" if f"{prefix}lm_head.weight" in tensors else f"{prefix}lm_heads.0.weight"
    shared = tensors.table(one, size, hidden_size) if is_shared else None

    def head(index: int) -> PyTree:
        blocks = [block(f"{prefix}blocks.{index}.layers.{j}") for j in range(num_blocks)]
        own = shared
        if own is None:
            own = tensors.table(f"{prefix}lm_heads.{index}.weight", size, hidden_size)
        return {"blocks": blocks, "head": own}

    heads = [head(index) for index in range(num_heads)]
    token_ids = tensors.integers(f"{prefix}token_map", size) if size < target.vocab_size else None
    tensors.check_all_read(*((f"{prefix}token_map",) if token_ids is None else ()))
    return heads, token_ids
