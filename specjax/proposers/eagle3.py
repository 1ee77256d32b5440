"""The head of EAGLE-3 and EAGLE-3.1: a decoder layer on several layers of the target and the next token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from specjax.models.attention import KeyValues
from specjax.models.layer import matrix_shape
from specjax.models.linear import Norm, linear, lookup, rms_norm
from specjax.proposers import trunk
from specjax.proposers.drawing import Reduced
from specjax.proposers.feature_draft import FeatureDraft, feature_draft
from specjax.types import Array, ModelInput, PyTree


@dataclass(frozen=True)
class Eagle3Head(trunk.FeatureHead):
    """Decoder layers on fc(taps), the first of which reads the normed embedding beside the normed feature.

    The target's residual stream at `num_taps` layers becomes a feature once, by `fc`. After the last of these features
    a row reads the output of the row before as it is.
    """

    target_size: int  # H, the hidden size of the target
    num_taps: int = 3  # layers of the target that `fc` reads; 0 reads its last hidden state, without `fc`
    tap_norms: str | None = None  # "each" norms every tap before `fc`, "all" norms them as one vector; None for none
    has_feature_norm: bool = True  # whether the feature is normed before the first layer reads it
    norm_before_residual: bool = False  # whether the residual stream begins with the normed feature
    norm_output: bool = False  # whether the next row reads the output after the last norm

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the parameters, but for `embedding` and `lm_head`."""
        config, hidden, size = self.config, self.hidden_size, self.target_size
        layers = trunk.layer_shapes(config, 2 * hidden)
        shapes: dict[str, Any] = {"embedding_norm": (hidden,), "layers": layers, "norm": (hidden,)}
        if self.num_taps:
            shapes["fc"] = matrix_shape(config, self.num_taps * size, hidden)
        if self.has_feature_norm:
            shapes["feature_norm"] = (hidden,)
        if self.tap_norms is not None:
            shapes["tap_norm"] = (self.num_taps * size,)
        return shapes

    def feature(self, params: PyTree, features: Any) -> Array:
        if not self.num_taps:
            return trunk.hidden_of(features, self.target_size)
        return self.fuse(params, trunk.taps_of(features, self.num_taps, self.target_size))

    def fuse(self, params: PyTree, taps: Array) -> Array:
        """Return the feature [B, T, h] of taps [B, T, N H]."""
        config, norm = self.config, None
        if self.tap_norms == "all":
            norm = params["tap_norm"], config.norm_eps
        elif self.tap_norms == "each":
            parts = zip(*(jnp.split(x, self.num_taps, axis=-1) for x in (taps, params["tap_norm"])), strict=True)
            taps = jnp.concatenate([rms_norm(x, (scale, config.norm_eps)) for x, scale in parts], axis=-1)
        with trunk.in_full_precision(params):
            return linear(taps, params["fc"], transposed=config.transposed, norm=norm)

    def run(
        self,
        params: PyTree,
        inputs: ModelInput,
        feature: Array,
        memories: Sequence[KeyValues],
        pick: trunk.Pick | None = None,
    ) -> tuple[Array, list]:
        config = self.config
        embedded = rms_norm(lookup(params["embedding"], inputs.tokens), (params["embedding_norm"], config.norm_eps))
        normed = feature
        if self.has_feature_norm:
            normed = rms_norm(feature, (params["feature_norm"], config.norm_eps))
        pair = jnp.concatenate([embedded, normed], axis=-1)
        residual = normed if self.norm_before_residual else feature
        with trunk.in_full_precision(params):
            return trunk.run_layers(config, params["layers"], pair, inputs, memories, residual, pick)

    def recurrent(self, params: PyTree, output: Array) -> Array:
        return rms_norm(output, (params["norm"], self.config.norm_eps)) if self.norm_output else output

    def logits(self, params: PyTree, output: Array) -> Array:
        return trunk.logits(params, output, Norm(params["norm"], self.config.norm_eps))


def eagle3(
    head: Eagle3Head,
    params: PyTree,
    num_draft_tokens: int,
    *,
    reduced: Reduced | None = None,
    temperature: float | Array | None = None,
) -> FeatureDraft:
    """Draft with a head of EAGLE-3 or EAGLE-3.1, in a chain.

    `eagle` describes the arguments. The target must give its residual stream at the layers that the head was trained
    on: see `models.with_feature_layers`.

    References:
        Li et al., EAGLE-3, NeurIPS 2025.
    """
    return feature_draft(head, params, num_draft_tokens, reduced, temperature)
