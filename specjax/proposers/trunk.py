"""Decoder layers on the target's features, common to the drafters that read them.

A drafter keeps in slot s of its cache the keys and values of token s with the target's feature of token s-1. Slot 0 has
no feature, and no other token sees it. Positions count slots: a rotation depends on distances alone, so it
does not matter where a reference begins to count.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jax.typing import DTypeLike

from specjax.models.attention import KeyValues, memories
from specjax.models.latent_attention import InitLatents, latent_mixer
from specjax.models.layer import Params, Shapes, run_layer
from specjax.models.linear import Norm, linear
from specjax.models.rope import rotation
from specjax.types import Array, Features, ModelInput, PyTree

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

NUM_HIDDEN = 1  # slots without a feature
Pick: TypeAlias = Partial  # a function of rows [B, T, h] that returns some of them [B', T', h]


def in_full_precision(params: Params) -> Any:
    """Return a context in which products of float32 parameters are exact on a GPU, too, as the target's are."""
    return jax.default_matmul_precision("highest" if params["embedding"].dtype == jnp.float32 else None)


@dataclass(frozen=True)
class FeatureHead(ABC):
    """Base of the heads on features, whose decoder layers keep keys and values in a cache."""

    config: "DecoderConfig"  # num_layers is the number of the head's layers, vocab_size is D
    takes_groups = True

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def __call__(
        self, params: PyTree, inputs: ModelInput, feature: Array, cache: list | None
    ) -> tuple[Array, list | None]:
        """Return the outputs [B, T, h] of the rows with the tokens of `inputs`, and the cache."""
        return self.picked(params, inputs, feature, cache, None)

    def picked(
        self, params: PyTree, inputs: ModelInput, feature: Array, cache: list | None, pick: Pick | None
    ) -> tuple[Array, list | None]:
        """Return the outputs of the rows that `pick` keeps [B', T', h], and the cache with all rows.

        Args:
            params, inputs, feature, cache: as the head takes them.
            pick: function of the residual stream [B, T, h] that returns some rows of it; None keeps all.
        """
        held = memories(inputs, cache, self.config.windows, NUM_HIDDEN)
        output, kept = self.run(params, inputs, feature, held, pick)
        return output, None if cache is None else kept

    @abstractmethod
    def feature(self, params: PyTree, features: Any) -> Array:
        """Return the input of rows from the target's features: [B, T, h]."""

    @abstractmethod
    def run(
        self,
        params: PyTree,
        inputs: ModelInput,
        feature: Array,
        memories: Sequence[KeyValues],
        pick: Pick | None = None,
    ) -> tuple[Array, list]:
        """Return the outputs [B, T, h], given the keys and values of each layer, and its cache afterwards.

        With `pick`, as `run_layers` takes it, outputs are of the rows that it keeps.
        """

    def recurrent(self, params: PyTree, output: Array) -> Array:
        return output

    def logits(self, params: PyTree, output: Array) -> Array:
        return logits(params, output)

    def init_cache(self, num_pages: int, page_size: int, dtype: DTypeLike) -> list:
        return init_cache(self.config, num_pages, page_size, dtype)


def run_layers(
    config: "DecoderConfig",
    params: Mapping[int, Params],
    x: Array,
    inputs: ModelInput,
    memories: Sequence[KeyValues],
    residual: Array | None = None,
    pick: Pick | None = None,
) -> tuple[Array, list]:
    """Run all layers.

    Args:
        config: sizes and options of the layers.
        params: the parameters of each layer, as `layer_shapes` names them. A layer without `attention_norm` reads its
            input as it is.
        x: [B, T, ...], which the first layer reads.
        inputs: the tokens of the call.
        memories: keys and values of each layer.
        residual: [B, T, h], the residual stream before the first layer; None is `x`.
        pick: function of the residual stream [B, T, h] that returns the rows for which the last layer goes on after its
            keys and values; None keeps all.

    Returns:
        The residual stream after the last layer [B, T, h], or some rows of it, and the cache of each layer afterwards.
    """
    turns = rotation(inputs.positions, config.head_size, config.rope_theta, config.rope_scaling, config.rotary_size)
    new_cache = []
    for i, (layer, memory) in enumerate(zip(config.each_layer, memories, strict=True)):
        of_layer = pick if i + 1 == config.num_layers else None
        x, kept = run_layer(config, layer, params[i], x, turns, memory, None if i else residual, pick=of_layer)
        new_cache.append(kept)
    return x, new_cache


def init_cache(config: "DecoderConfig", num_pages: int, page_size: int, dtype: DTypeLike) -> list:
    """Return a pool of zeros, or the dense cache of `num_pages` rows with `page_size` slots."""
    if latent_mixer(config.layers) is not None:
        return InitLatents(config, str(jnp.dtype(dtype)))(num_pages, page_size)
    shape = num_pages, page_size, config.num_kv_heads, config.head_size
    return [{name: jnp.zeros(shape, dtype) for name in ("key", "value")} for _ in range(config.num_layers)]


def layer_shapes(config: "DecoderConfig", inputs: int | None = None) -> dict[int, Shapes]:
    """Return the shapes of the parameters of all layers.

    Args:
        config: sizes and options of the layers.
        inputs: numbers of a token that the first layer reads as they are; None: it reads the residual stream normed, as
            the other layers do.
    """
    return {i: layer.shapes(config, None if i else inputs) for i, layer in enumerate(config.each_layer)}


def random_params(shapes: PyTree, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
    """Return random parameters of these shapes: norms of ones, biases of zeros and normal matrices.

    Args:
        shapes: a nested dict of shapes, such as `Eagle3Head.shapes` returns.
        key: a typed key.
        dtype: of the parameters.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))

    def make(path: tuple, shape: tuple[int, ...], key: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        return jnp.zeros(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([make(path, shape, k) for (path, shape), k in zip(leaves, keys, strict=True)])


def logits(params: Params, output: Array, norm: Norm | None = None) -> Array:
    """Return the logits [B, T, D] float32 of outputs [B, T, h], after a norm if there is one."""
    with in_full_precision(params):
        return linear(output, params["lm_head"], transposed=True, norm=norm, dtype=jnp.float32)


def hidden_of(features: Any, size: int) -> Array:
    """Return the target's final hidden states [B, T, H].

    Raises:
        ValueError: the target gives none of this size.
    """
    if not isinstance(features, Features):
        raise ValueError(f"the target must give its hidden states, ModelOutput.features, got {_kind(features)}")
    if features.hidden.shape[-1] != size:
        raise ValueError(f"features.hidden must be of H = {size} numbers a token, got {features.hidden.shape[-1]}")
    return features.hidden


def taps_of(features: Any, count: int, size: int) -> Array:
    """Return the target's residual stream at `count` layers, [B, T, count * H].

    Raises:
        ValueError: the target does not give it, or for another number of layers.
    """
    taps = features.taps if isinstance(features, Features) else None
    if taps is None:
        raise ValueError(
            f"the target must give its residual stream at {count} layers, features.taps, which "
            f"models.with_feature_layers asks for, got {'none' if isinstance(features, Features) else _kind(features)}"
        )
    if taps.shape[-1] != count * size:
        raise ValueError(
            f"features.taps must be of {count} layers with H = {size}, {count * size} numbers a token, "
            f"got {taps.shape[-1]}: ask models.with_feature_layers for the layers of this drafter"
        )
    return taps


def _kind(features: Any) -> str:
    return "None" if features is None else type(features).__name__
