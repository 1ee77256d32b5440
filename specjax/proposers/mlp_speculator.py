"""MLP speculator: a small recurrent network on the target's last hidden state and the tokens drafted so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.decoding.drafters import InMemory, check_draft_length
from specjax.models.directory import Checkpoint
from specjax.models.linear import linear, lookup
from specjax.proposers import last_feature
from specjax.proposers.drawing import draft_options, drawer_of, last_token, only_in
from specjax.proposers.feature_draft import has_feature
from specjax.proposers.files import check_depth, expect, open_directory, refuse_unread, target_weights
from specjax.proposers.none import Paused
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, Memory, Model, ModelInput, PyTree, Verified
from specjax.validation import check_array

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors

EPSILON = 1e-6  # of the norms


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["steps", "temperature"],
    meta_fields=["num_draft_tokens", "scale_input", "is_greedy"],
)
@dataclass(frozen=True)
class MLPSpeculator(InMemory):
    """A proposer that draws each draft from a state, which every token before it changes."""

    steps: list[PyTree]  # of the trained depth: "embedding", "projection", "norm", "norm_bias" and "head" of each draft
    num_draft_tokens: int
    scale_input: bool = False  # whether the target's hidden state is first brought to a root mean square of 1 / sqrt(2)
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "MLPSpeculator | Paused":
        check_draft_length(num_draft_tokens, len(self.steps))
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else Paused(self)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        projection = self.steps[0]["projection"]
        return Memory(rows=jnp.zeros((batch_size, projection.shape[1]), projection.dtype))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return last_feature.prefill(inputs, previous, features, state)

    def propose(self, keys: Array, context: Context, sampling: Sampling, state: Memory) -> tuple[Draft, Memory]:
        logits, carry = self.next_logits(last_token(context), 0, self.first(state.rows[:, None]))
        drawer = drawer_of(self, keys, context, sampling)
        draft, _ = drawer.chain(logits, self.next_logits, carry, is_static=True)
        return only_in(has_feature(context), draft), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return last_feature.update(context, verified, features, state)

    def first(self, hidden: Array) -> Array:
        """Return the state [B, T, H] before the first draft, given the target's hidden states."""
        return _normalized(hidden) * 2**-0.5 if self.scale_input else hidden

    def next_logits(self, token: Array, index: int, state: Array) -> tuple[Array, Array]:
        """Return the logits [B, T, V] of a draft and the new state, given the token [B, T] before it and the state."""
        step = self.steps[index]
        of_state = 0.5 ** (0.5 / len(self.steps))
        of_token = math.sqrt((1 - of_state**2) * step["norm"].shape[0] / 2)
        with jax.default_matmul_precision("highest" if state.dtype == jnp.float32 else None):
            embedded = lookup(step["embedding"], token) * jnp.asarray(of_token / of_state, state.dtype)
            mixed = _normalized(linear(state, step["projection"], transposed=True, residual=embedded))
            state = jax.nn.gelu(mixed * step["norm"][None, None] + step["norm_bias"][None, None], approximate=False)
            return linear(state, step["head"], transposed=True, dtype=jnp.float32), state


def _normalized(x: Array) -> Array:
    """Scale x [B, T, D] to unit root mean square, in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)


def mlp_speculator(
    steps: Sequence[PyTree],
    *,
    num_draft_tokens: int | None = None,
    scale_input: bool = False,
    temperature: float | Array | None = None,
) -> MLPSpeculator:
    """Draft with a recurrent network on the target's final hidden state and the tokens since.

    The first draft is made of the hidden state from which the target drew the last committed token, and this token;
    each further one of the state so far and the draft before it. The target must return `Features`, as the built-in
    models do.

    Args:
        steps: for each draft "embedding" [V, D], "projection" [D, H] for the first and [D, D] for the others, "norm"
            and "norm_bias" [D], and "head" [V, D]. Steps that share weights hold the same arrays. Their number, the
            trained depth, is part of the formula, so leave none out where fewer drafts are wanted.
        num_draft_tokens: K, at most the number of steps; None is all.
        scale_input: whether the hidden state is normalised first.
        temperature: the temperature of drafts, as `draft_model` takes it.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: an array has a wrong shape, or a number is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> from specjax import proposers
        >>> step = {"embedding": jnp.ones((10, 4)), "projection": jnp.ones((4, 4)), "head": jnp.ones((10, 4))}
        >>> step |= {"norm": jnp.ones(4), "norm_bias": jnp.zeros(4)}
        >>> proposers.mlp_speculator([step] * 3, num_draft_tokens=2).num_draft_tokens
        2

    References:
        Wertheimer et al., Accelerating Production LLMs with Combined Token/Embedding Speculators, 2024.
    """
    if not steps:
        raise ValueError("steps must hold at least one step, got none")
    num_drafts = check_depth(num_draft_tokens, len(steps), "the number of steps")
    vocab_size, inner = jnp.shape(steps[0]["embedding"])
    for i, step in enumerate(steps):
        shapes = {
            "embedding": (vocab_size, inner),
            "projection": (inner, inner if i else None),
            "head": (vocab_size, inner),
        }
        for name, shape in (shapes | {"norm": (inner,), "norm_bias": (inner,)}).items():
            axes = {"projection": "[D, D]" if i else "[D, H]", "norm": "[D]", "norm_bias": "[D]"}.get(name, "[V, D]")
            check_array(f"steps[{i}][{name!r}]", step[name], axes, shape, jnp.floating)
    temperature, is_greedy = draft_options(num_drafts, temperature)
    return MLPSpeculator(list(steps), num_drafts, scale_input, temperature, is_greedy)


def is_mlp_speculator(names: list[str]) -> bool:
    """Return whether tensors of these names are an MLP speculator."""
    return {"emb.0.weight", "proj.0.weight", "ln.0.weight"} <= {name.removeprefix("speculator.") for name in names}


def load_mlp_speculator(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> MLPSpeculator:
    """Load an MLP speculator for a target: config.json of the type mlp_speculator, and tensors `speculator.*`.

    Args:
        directory: the checkpoint of the speculator, or its directory.
        target: a built-in model.
        num_draft_tokens: K, at most the trained depth; None is that.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    config, tensors = open_directory(directory, target, fields)
    config.only("model_type", "mlp_speculator")
    depth = config.size("n_predict", most=64)
    check_depth(num_draft_tokens, depth, config.where("n_predict"))
    scale_input = config.get("scale_input", bool, False)
    steps = _steps(config, tensors, target, depth)
    refuse_unread(config, "*norm*", "*scale*", "*act*", "*bias*", "quant*", "*dim", "*vocab*")
    tensors.check_all_read()
    return mlp_speculator(steps, num_draft_tokens=num_draft_tokens, scale_input=scale_input, temperature=temperature)


def _steps(config: "ConfigFile", tensors: "Tensors", target: Model, depth: int) -> list[PyTree]:
    """Read the weights of each step. With tied weights all steps share them, but for the first projection."""
    weights = target_weights(target)
    hidden_size = weights.hidden_size
    expect(config.where("emb_dim"), config.size("emb_dim"), hidden_size, "the hidden size of the target")
    vocab_size = config.size("vocab_size")
    expect(config.where("vocab_size"), vocab_size, target.vocab_size, "the vocabulary of the target")
    inner = config.get("inner_dim", int, 0) or hidden_size
    is_tied = config.get("tie_weights", bool, False)
    prefix = "speculator." if any(name.startswith("speculator.") for name in tensors.names()) else ""
    read: dict[str, Array] = {}

    def once(name: str, *shape: int) -> Array:
        name = prefix + name
        if name not in read:
            read[name] = tensors.table(name, *shape) if len(shape) == 2 else tensors.vectors({name: shape[0]})
        return read[name]

    def step(index: int) -> PyTree:
        own, of_projection = (0, min(index, 1)) if is_tied else (index, index)
        return {
            "embedding": once(f"emb.{own}.weight", vocab_size, inner),
            "projection": once(f"proj.{of_projection}.weight", inner, inner if index else hidden_size),
            "norm": once(f"ln.{own}.weight", inner),
            "norm_bias": once(f"ln.{own}.bias", inner),
            "head": once(f"head.{own}.weight", vocab_size, inner),
        }

    steps = [step(index) for index in range(depth)]
    if is_tied:
        _check_ties(tensors, prefix, depth, vocab_size, inner)
    return steps


def _check_ties(tensors: "Tensors", prefix: str, depth: int, vocab_size: int, inner: int) -> None:
    """Raise ValueError where tensors that are tied differ. Files may hold the shared tensors once or for each step."""
    for index in range(1, depth):
        for name, shape in (("emb", (vocab_size, inner)), ("head", (vocab_size, inner))):
            tensors.check_same(f"{prefix}{name}.{index}.weight", f"{prefix}{name}.0.weight", *shape)
        for name in ("weight", "bias"):
            tensors.check_same(f"{prefix}ln.{index}.{name}", f"{prefix}ln.0.{name}", inner)
        if index > 1:
            tensors.check_same(f"{prefix}proj.{index}.weight", f"{prefix}proj.1.weight", inner, inner)
