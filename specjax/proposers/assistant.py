"""The assistants of Gemma 4: small models whose layers attend to keys and values that the target keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import HeadNorms
from specjax.decoding.drafters import InMemory, check_draft_length
from specjax.models.attention import Cache, attend_to_cache, attention_mask, cache_scales, normed, num_slots
from specjax.models.decoder import DecoderConfig
from specjax.models.directory import Checkpoint
from specjax.models.layer import LayerConfig, norm_of, run_layer, times
from specjax.models.linear import linear, lookup, rms_norm
from specjax.models.network import Apply
from specjax.models.rope import Rotation, rotate, rotation
from specjax.pages import locate
from specjax.proposers import last_feature, trunk
from specjax.proposers.drawing import draft_options, drawer_of, last_token, only_in
from specjax.proposers.feature_draft import has_feature
from specjax.proposers.files import expect, num_drafts, open_directory, other_target, target_weights
from specjax.proposers.none import Paused
from specjax.sampling import Sampling
from specjax.types import Array, Context, Draft, Memory, Model, ModelInput, PyTree, Verified


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "inputs", "mask", "scales"], meta_fields=["window"])
@dataclass(frozen=True)
class TargetKeys:
    """The cache of a layer of the target, for one query of each row that stands after all keys.

    Attention to a cache writes the keys of its call. Here they are the last ones that the cache holds, so it changes no
    number.
    """

    cache: Cache
    inputs: ModelInput  # [B, 1], at the last slot that the target has fed
    mask: Array  # [B, 1, 1, S] bool
    window: int | None
    scales: tuple[Array, Array] | None  # of the target's cache

    def attend(
        self,
        query: Array,
        key: None,
        value: None,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Cache]:
        """Attend as `KeyValues` says, to the keys and values of the target."""
        return attend_to_cache(
            rotate(normed(query, key, norms)[0], turns),
            self._last("key", query.dtype),
            self._last("value", query.dtype),
            self.cache,
            self.inputs,
            self.mask,
            window=self.window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            scales=self.scales,
        )

    def _last(self, name: str, dtype: Any) -> Array:
        """Return the keys or the values of the last token [B, 1, kv heads, D]."""
        leaf = self.cache[name]
        held = leaf.at[locate(leaf, self.inputs.positions, self.inputs.pages)].get(mode="fill", fill_value=0)
        if self.scales is None:
            return held.astype(dtype)
        scale = self.scales[0 if name == "key" else 1]
        return (held.astype(jnp.float32) * scale[None, None, :, None]).astype(dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "temperature"],
    meta_fields=["config", "embedding_factor", "num_draft_tokens", "num_groups", "is_greedy"],
)
@dataclass(frozen=True)
class Assistant(InMemory):
    """A proposer whose layers have queries alone, and attend to the keys and values of the target's last layers.

    A draft is drawn from the embedding of the token before it and from a hidden state, at first the target's, then its
    own. All drafts of a step stand at the position of the pending token, and see the tokens before it.
    """

    # "pre_projection" [h, 2 H], "layers", "norm" [h], "post_projection" [H, h], "lm_head" [V, h], the target's
    # "embedding" [V, H]; with groups "centroids" [C, h] and "token_ids" [C, V / C] int32, the tokens of each group
    params: PyTree
    config: DecoderConfig  # of the layers, where `keys_of` is a layer of the target
    embedding_factor: float  # of the target
    num_draft_tokens: int
    num_groups: int | None = None  # groups of tokens with logits, which have the largest scores; None: all tokens
    temperature: Array | None = None  # [] or [B] float32
    is_greedy: bool = False
    reads_memory = writes_memory = takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "Assistant | Paused":
        check_draft_length(num_draft_tokens)
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else Paused(self)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        table = self.params["embedding"]
        return Memory(rows=jnp.zeros((batch_size, table.shape[1]), table.dtype))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return last_feature.prefill(inputs, previous, features, state)

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return last_feature.update(context, verified, features, state)

    def propose(
        self, keys: Array, context: Context, sampling: Sampling, state: Memory, memory: Memory
    ) -> tuple[Draft, Memory, Memory]:
        def advance(token: Array, index: Any, carry: tuple[Array, Any]) -> tuple[Array, tuple[Array, Any]]:
            hidden, pools = carry
            with trunk.in_full_precision(self.params):
                output, pools = self._run(context, token, hidden, pools)
                hidden = linear(output, self.params["post_projection"], transposed=True)
                return self._logits(output), (hidden, pools)

        logits, carry = advance(last_token(context), 0, (state.rows[:, None], memory.pools))
        drawer = drawer_of(self, keys, context, sampling, is_partial=self.num_groups is not None)
        draft, (_, pools) = drawer.chain(logits, advance, carry)
        return only_in(has_feature(context), draft), state, replace(memory, pools=pools)

    def _run(self, context: Context, token: Array, hidden: Array, pools: Any) -> tuple[Array, Any]:
        """Return the output [B, 1, h] of the layers after their last norm, and the target's pools."""
        config, params = self.config, self.params
        embedded = times(lookup(params["embedding"], token), self.embedding_factor)
        x = linear(jnp.concatenate([embedded, hidden], axis=-1), params["pre_projection"], transposed=True)
        last = jnp.maximum(context.length - 2, 0)[:, None]  # the last slot that the target has fed
        inputs, pools = ModelInput(token, last, pages=context.pages), list(pools)
        for i, layer in enumerate(config.each_layer):
            mixer, rope = layer.mixer, config.rope if layer.mixer.rope is None else layer.mixer.rope
            cache = pools[mixer.keys_of]
            slots = num_slots(cache, inputs)
            turns = rotation(last + 1, mixer.sized(config).head_size, rope.theta, rope.scaling, rope.size, slots)
            mask = attention_mask(inputs, slots, mixer.window)
            memory = TargetKeys(cache, inputs, mask, mixer.window, cache_scales(params["layers"][i]))
            x, pools[mixer.keys_of] = run_layer(config, layer, params["layers"][i], x, turns, memory)
        return rms_norm(x, norm_of(params["norm"], config)), pools

    def _logits(self, output: Array) -> Array:
        """Return the logits [B, 1, V] float32, -inf for tokens outside the groups with the largest scores."""
        params = self.params
        if self.num_groups is None:
            return linear(output, params["lm_head"], transposed=True, dtype=jnp.float32)
        scores = linear(output, params["centroids"], transposed=True, dtype=jnp.float32)
        _, groups = jax.lax.top_k(scores[:, 0], self.num_groups)
        ids = params["token_ids"][groups].reshape(output.shape[0], -1)  # [B, N]
        own = jnp.einsum("bh,bnh->bn", output[:, 0], params["lm_head"][ids], preferred_element_type=jnp.float32)
        nothing = jnp.full((output.shape[0], params["lm_head"].shape[0]), -jnp.inf)
        return nothing.at[jnp.arange(len(ids))[:, None], ids].set(own)[:, None]


def is_assistant(names: list[str]) -> bool:
    """Return whether tensors of these names are an assistant's."""
    return {"pre_projection.weight", "post_projection.weight"} <= set(names)


def load_assistant(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Assistant:
    """Load an assistant of Gemma 4.

    Args:
        directory: the checkpoint of the assistant, or its directory.
        target: the Gemma 4 that it was trained for, on one device.
        num_draft_tokens: K >= 1; None is 8.
        rope_theta: None; the layers turn in two ways, as config.json says.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    from specjax.models.families import gemma4, llama

    config, tensors = open_directory(directory, target, fields)
    weights, apply = target_weights(target), target.apply
    if not (isinstance(apply, Apply) and isinstance(apply.config, DecoderConfig)):
        raise ValueError(f"target must be a Gemma 4 on one device, for an assistant, got {apply!r}")
    if rope_theta is not None:
        raise ValueError(f"rope_theta must be None for an assistant, whose layers turn in two ways, got {rope_theta!r}")
    own = apply.config
    model_type = config.choice("model_type", ("gemma4_assistant", "gemma4_unified_assistant"))
    where = config.where("backbone_hidden_size")
    expect(where, config.size("backbone_hidden_size", 1536), weights.hidden_size, "the hidden size of the target")
    text = config.table("text_config").with_defaults(**gemma4.defaults_of(model_type))
    text.only("enable_moe_block", False)
    text.only("use_double_wide_mlp", False)
    text.only("hidden_size_per_layer_input", 0)
    text.ignore("num_experts", "top_k_experts", "moe_intermediate_size", "final_logit_softcapping")
    parts = gemma4.read_parts(text)
    layers = tuple(
        LayerConfig(
            replace(parts.mixers[kind], keys_of=_lender(own, kind == gemma4.FULL)),
            parts.mlp,
            has_post_norms=True,
            has_scale=True,
        )
        for kind in parts.types
    )
    options: dict[str, Any] = {"head_size": 256, "tie_embeddings": True, "rope": parts.rope}
    sizes = llama.config_of(text, layers, transposed=tensors.on_one_gpu, **options)
    expect(text.where("vocab_size"), sizes.vocab_size, own.vocab_size, "the vocabulary of the target")
    for layer in layers:
        _check_keys(sizes, layer, own)
    config.check_computation()
    text.check_computation()
    hidden, backbone = sizes.hidden_size, weights.hidden_size
    params = {
        "pre_projection": tensors.table("pre_projection.weight", hidden, 2 * backbone),
        "post_projection": tensors.table("post_projection.weight", backbone, hidden),
        "layers": {
            i: llama.layer_params(sizes, layer, tensors, f"model.layers.{i}", gemma4.NORMS)
            | _scales(target.params["layers"][layer.mixer.keys_of])
            for i, layer in enumerate(layers)
        },
        "norm": tensors.vectors({"model.norm.weight": hidden}),
        "lm_head": tensors.table("model.embed_tokens.weight", sizes.vocab_size, hidden),
        "embedding": weights.embedding,
    }
    tensors.check_same("lm_head.weight", "model.embed_tokens.weight", sizes.vocab_size, hidden)
    num_groups = None
    if config.get("use_ordered_embeddings", bool, False):
        number = config.size("num_centroids", 2048)
        num_groups = config.size("centroid_intermediate_top_k", 32, most=number)
        params["centroids"] = tensors.table("masked_embedding.centroids.weight", number, hidden)
        params["token_ids"] = _token_ids(tensors, number, sizes.vocab_size)
    tensors.check_all_read("*.rotary_emb.inv_freq", "*.k_proj.weight", "*.v_proj.weight", "*.k_norm.weight")
    number = num_drafts(num_draft_tokens)
    temperature, is_greedy = draft_options(number, temperature)
    return Assistant(params, sizes, own.embedding_factor, number, num_groups, temperature, is_greedy)


def _lender(target: DecoderConfig, is_full: bool) -> int:
    """Return the last layer of the target with its own keys and values, of those with a window or without one."""
    owned = [i for i, owner in enumerate(target.owners) if owner == i]
    found = [i for i in owned if (target.windows[i] is None) == is_full]
    if not found:
        kind = "without a window" if is_full else "with a window"
        raise other_target(f"target must have a layer {kind} that keeps keys and values, got none")
    return found[-1]


def _check_keys(config: DecoderConfig, layer: LayerConfig, target: DecoderConfig) -> None:
    """Raise ValueError unless the queries of a layer fit the keys of the target's layer."""
    lender = target.each_layer[layer.mixer.keys_of].mixer
    own, kept = layer.mixer.sized(config), lender.sized(target)
    name = f"layer {layer.mixer.keys_of} of the target"
    expect("the size of its heads", own.head_size, kept.head_size, f"the size of heads in {name}")
    expect("its window", layer.mixer.window, lender.window, f"the window of {name}")
    if own.num_heads % kept.num_kv_heads:
        raise other_target(
            f"num_attention_heads must be a multiple of {kept.num_kv_heads}, the key heads in {name}, got "
            f"{own.num_heads}"
        )


def _scales(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scales of the cache of a layer of the target, if it has any."""
    return {name: layer[name] for name in ("key_scale", "value_scale") if name in layer}


def _token_ids(tensors: Any, num_centroids: int, vocab_size: int) -> Array:
    """Return the tokens of each group [C, V / C] int32."""
    name = "masked_embedding.token_ordering"
    if vocab_size % num_centroids:
        raise ValueError(f"num_centroids must divide the vocabulary of {vocab_size}, got {num_centroids}")
    whole, by_group = (vocab_size,), (num_centroids, vocab_size // num_centroids)
    ids = tensors.integers(name, *(by_group if tensors.shape(name) == by_group else whole)).ravel()
    if not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise ValueError(f"tensor {name} must have each of the {vocab_size} tokens once")
    return jnp.asarray(ids.reshape(num_centroids, -1), jnp.int32)
