"""Drafts from a quantised copy of the target, which reads and writes the target's cache."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.decoding.calls import run
from specjax.decoding.drafters import InMemory, check_draft_length
from specjax.models.decoder import DecoderConfig
from specjax.models.network import Apply
from specjax.models.quantized import FORMATS, Quantized, dequantize, quantize
from specjax.parallel import OnMesh, of_one_device
from specjax.proposers.drawing import draft_options, drawer_of, last_token, only_in
from specjax.proposers.none import NoDrafts, none
from specjax.proposers.split import rows_to_draft, run_where_in_place
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, Memory, Model, ModelInput, PyTree, Verified
from specjax.validation import is_integer, suggestion

# Parameters of layers with two axes that stay as they are: `quantization` of `models.load` rounds none of them.
AS_STORED = "router", "shared_gate", "latent_up", "experts_gate_up_bias", "experts_out_bias", "query_norm", "key_norm"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "temperature"],
    meta_fields=["num_draft_tokens", "is_greedy", "speculate_below"],
)
@dataclass(frozen=True)
class SelfDraft(InMemory):
    """A proposer that draws K tokens from a model whose cache is the target's own.

    The model is fed the pending token and all drafts but the last, at the slots from `length` - 1 on. Verification
    feeds the same slots to the target and overwrites the keys and values of the drafts there, so nothing is kept from
    step to step, and rows may skip any step.
    """

    model: Model  # of the target's form: it takes the target's memory
    num_draft_tokens: int
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    speculate_below: int | None = None
    reads_memory = writes_memory = takes_groups = True

    @property
    def takes_pages(self) -> bool:
        return self.model.takes_pages

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "SelfDraft | NoDrafts":
        check_draft_length(num_draft_tokens)
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else none()

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory()

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory, memory: Memory
    ) -> tuple[Draft, Memory, Memory]:
        speculates, may_skip = rows_to_draft(context, self.num_draft_tokens, None, self.speculate_below)
        operands = keys, context, sampling, memory
        draft, memory = run_where_in_place(speculates, self._draft, *operands) if may_skip else self._draft(*operands)
        return only_in(speculates, draft), state, memory

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return state

    def _draft(self, keys: Array, context: Context, sampling: Sampling, memory: Memory) -> tuple[Draft, Memory]:
        """Draw K tokens for every row; return the draft, and the memory with keys and values of the drafts."""
        start = jnp.maximum(context.length - 1, 0)[:, None]

        def advance(token: Array, index: Array | int, memory: Memory) -> tuple[Array, Memory]:
            output, memory = run(self.model, ModelInput(token, start + index, pages=context.pages), memory)
            return self._whole(output.logits), memory

        logits, memory = advance(last_token(context), 0, memory)
        return drawer_of(self, keys, context, sampling).chain(logits, advance, memory)

    def _whole(self, logits: Array) -> Array:
        """Return the logits [B, 1, V] of all devices that share the vocabulary, without padding."""
        if self.model.axis_name is None:
            return logits
        logits = jax.lax.all_gather(logits, self.model.axis_name, axis=2, tiled=True)
        return logits[..., : self.model.vocab_size]


def self_draft(
    target: Model,
    num_draft_tokens: int,
    *,
    quantization: str = "int4",
    temperature: float | Array | None = None,
    speculate_below: int | None = None,
) -> SelfDraft:
    """Draft with a quantised copy of the target's own matrices, on the target's own cache.

    It needs no other checkpoint, no second cache and no prefill: verification overwrites the drafts' keys and values.
    Embeddings, norms, routers and biases are the target's arrays, and so is a head that is tied to the embeddings.
    Another head has 8 bits where the matrices of the layers have 4. Drafts are drawn by all sampling parameters of
    their request, and report the distribution that they were drawn from.

    Args:
        target: the target, of `models.load` or `decoder_model`, on one device or on a mesh. Matrices of as few bits as
            `quantization` asks for are shared, too.
        num_draft_tokens: K >= 1.
        quantization: the format of the copy: "int4", "int8" or "fp8", as `models.quantized.quantize` takes it.
        temperature: the temperature of drafts, as `draft_model` takes it.
        speculate_below: rows speculate only while fewer rows than this number are active, as `draft_model` takes it.

    Returns:
        A proposer for this target.

    Raises:
        ValueError: the target is not one that specjax built, or keeps more of a sequence than slots, or a number or the
            format is out of its range.

    Example:
        >>> from specjax import models, proposers
        >>> target = models.load(models.EMBEDDED / "target")
        >>> proposers.self_draft(target, 4).num_draft_tokens
        4
    """
    if not isinstance(target, Model):
        raise ValueError(f"target must be a Model, got {type(target).__name__}")
    for name in ("init_rows", "commit"):
        if getattr(target, name) is not None:
            raise ValueError(
                f"target must keep nothing but slots to draft for itself: its {name} must be None, because drafts "
                "would change a recurrent state, which verification does not overwrite"
            )
    if not isinstance(of_one_device(target), Apply):
        raise ValueError(f"target must be one that specjax built, to be quantised, got {target.apply!r}")
    if quantization not in FORMATS:
        hint = suggestion(quantization, FORMATS)
        raise ValueError(f"quantization must be one of {', '.join(FORMATS)}, got {quantization!r}{hint}")
    if not (speculate_below is None or (is_integer(speculate_below) and speculate_below >= 1)):
        raise ValueError(f"speculate_below must be None or >= 1, got {speculate_below!r}")
    values, is_greedy = draft_options(num_draft_tokens, temperature)
    return SelfDraft(quantized_copy(target, quantization), int(num_draft_tokens), values, is_greedy, speculate_below)


def quantized_copy(model: Model, quantization: str) -> Model:
    """Return a built-in model with quantised matrices in its layers and its head, and the same arrays elsewhere."""
    apply = of_one_device(model)
    transposed = isinstance(apply.config, DecoderConfig) and apply.config.transposed
    named, tree = jax.tree_util.tree_flatten_with_path(model.params, is_leaf=lambda x: isinstance(x, Quantized))
    specs = list(model.apply.param_specs) if isinstance(model.apply, OnMesh) else []
    leaves, new_specs = [], []
    for path, leaf in named:
        count = len(jax.tree.leaves(leaf))
        own, specs = specs[:count], specs[count:]
        name = path[-1].key
        format = None if name in AS_STORED else _format_of(path[0].key, leaf, quantization)
        if format is not None:
            has_outputs_first = transposed or name == "head" or name.startswith("experts_")
            turned = not (has_outputs_first or isinstance(leaf, Quantized))
            if isinstance(model.apply, OnMesh):
                spec = P(*reversed([*own[0], *[None] * (leaf.ndim - len(own[0]))])) if turned else own[0]
                given = {"mesh": model.apply.mesh, "specs": tuple(own), "out": spec}
                leaf = _quantized_on_mesh(leaf, format=format, turned=turned, **given)
                own = [spec] * len(jax.tree.leaves(leaf))
            else:
                leaf = _quantized(leaf, format, turned)
        leaves.append(leaf)
        new_specs += own
    apply = replace(apply, feature_layers=())
    if isinstance(model.apply, OnMesh):
        apply = replace(model.apply, apply=apply, param_specs=tuple(new_specs))
    return replace(model, params=jax.tree.unflatten(tree, leaves), apply=apply, feature_layers=())


def _format_of(name: str, leaf: Array | Quantized, quantization: str) -> str | None:
    """Return the format for a parameter below `name` of the parameters; None where it stays as it is."""
    if name not in ("layers", "head") or leaf.ndim < 2:
        return None
    format = "int8" if name == "head" and quantization == "int4" else quantization
    has_few_bits = isinstance(leaf, Quantized) and leaf.bits <= (4 if format == "int4" else 8)
    return None if has_few_bits else format


def _quantized(leaf: Array | Quantized, format: str, turned: bool) -> Quantized:
    """Return a quantised matrix [N, K]; `turned` says that the matrix is [K, N]."""
    if isinstance(leaf, Quantized):
        leaf = dequantize(leaf, leaf.dtype)
    return quantize(jnp.swapaxes(leaf, -1, -2) if turned else leaf, format)


@partial(jax.jit, static_argnames=("format", "turned", "mesh", "specs", "out"))  # equal layers share a program
def _quantized_on_mesh(
    leaf: Array | Quantized, *, format: str, turned: bool, mesh: Mesh, specs: tuple[P, ...], out: P
) -> Quantized:
    """Quantise on every device its part of a matrix; inside `jax.shard_map` the result is again such a part."""
    given = jax.tree.unflatten(jax.tree.structure(leaf), specs)
    make = partial(_quantized, format=format, turned=turned)
    return jax.shard_map(make, mesh=mesh, in_specs=(given,), out_specs=out, check_vma=False)(leaf)
