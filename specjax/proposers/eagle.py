"""The head of EAGLE, EAGLE-2 and HASS: one decoder layer on the target's last hidden state and the next token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from specjax.models.attention import KeyValues
from specjax.models.layer import matrix_shape
from specjax.models.linear import linear, lookup
from specjax.proposers import trunk
from specjax.proposers.drawing import Reduced
from specjax.proposers.feature_draft import FeatureDraft, feature_draft
from specjax.types import Array, ModelInput, PyTree


@dataclass(frozen=True)
class EagleHead(trunk.FeatureHead):
    """Decoder layers that read fc([embedding; feature]) and give the next feature, which the target's head scores.

    The first layer has no norm before its attention, and no norm follows the last one.
    """

    has_bias: bool = False  # whether `fc` has a bias

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the parameters, but for `embedding` and `lm_head`."""
        config, hidden = self.config, self.hidden_size
        bias = {"fc_bias": (hidden,)} if self.has_bias else {}
        return {"fc": matrix_shape(config, 2 * hidden, hidden), **bias, "layers": trunk.layer_shapes(config, hidden)}

    def feature(self, params: PyTree, features: Any) -> Array:
        return trunk.hidden_of(features, self.hidden_size)

    def run(
        self,
        params: PyTree,
        inputs: ModelInput,
        feature: Array,
        memories: Sequence[KeyValues],
        pick: trunk.Pick | None = None,
    ) -> tuple[Array, list]:
        config = self.config
        with trunk.in_full_precision(params):
            pair = jnp.concatenate([lookup(params["embedding"], inputs.tokens), feature], axis=-1)
            bias = params["fc_bias"][None, None] if self.has_bias else None
            x = linear(pair, params["fc"], transposed=config.transposed, residual=bias)
            return trunk.run_layers(config, params["layers"], x, inputs, memories, pick=pick)


def eagle(
    head: EagleHead,
    params: PyTree,
    num_draft_tokens: int,
    *,
    reduced: Reduced | None = None,
    temperature: float | Array | None = None,
) -> FeatureDraft:
    """Draft with a head of EAGLE, EAGLE-2 or HASS, in a chain.

    The drafts are drawn by the sampling parameters of their request, and report the distribution that they were drawn
    from. A sequence of one token gets no drafts, because no token before it has a feature.

    Args:
        head: sizes and options of the head.
        params: its parameters, of the shapes that `head.shapes()` gives; `embedding` [V, h] and `lm_head` [D, h], which
            are mostly the target's own.
        num_draft_tokens: K >= 1.
        reduced: the draft vocabulary; None where it is the target's.
        temperature: the temperature of drafts, for requests that are not greedy. None takes the temperature of the
            request. A number, or one number per row [B], replaces it. 0 makes greedy drafts for all requests, which are
            deterministic and report no distribution.

    Returns:
        A proposer.

    Raises:
        ValueError: a number is out of its range.

    References:
        Li et al., EAGLE, ICML 2024; EAGLE-2, EMNLP 2024. Zhang et al., HASS, ICLR 2025.
    """
    return feature_draft(head, params, num_draft_tokens, reduced, temperature)
