"""The head of EAGLE, EAGLE-2 and HASS: one decoder layer on the target's last hidden state and the next token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.models.linear import linear
from specjax.proposers import trunk
from specjax.proposers.drawing import Reduced
from specjax.proposers.feature_draft import FeatureDraft, feature_draft
from specjax.types import Array, ModelInput, PyTree

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class EagleHead:
    """Decoder layers that read fc([embedding; feature]) and give the next feature, which the target's head scores.

    The first layer has no norm before its attention, and no norm follows the last one.
    """

    config: "DecoderConfig"  # num_layers are those of the head, vocab_size is D
    has_bias: bool = False  # whether `fc` has a bias

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the parameters, but for `embedding` and `lm_head`."""
        config, hidden = self.config, self.hidden_size
        layers = {i: trunk.layer_shapes(config, hidden) for i in range(config.num_layers)}
        for i in range(1, config.num_layers):
            layers[i]["attention_norm"] = (hidden,)
        bias = {"fc_bias": (hidden,)} if self.has_bias else {}
        return {"fc": trunk.matrix_shape(config, 2 * hidden, hidden), **bias, "layers": layers}

    def feature(self, params: PyTree, features: Any) -> Array:
        return trunk.hidden_of(features, self.hidden_size)

    def __call__(
        self, params: PyTree, inputs: ModelInput, feature: Array, cache: list | None
    ) -> tuple[Array, list | None]:
        config, call = self.config, trunk.call_of(self.config, inputs, cache)
        with trunk.in_full_precision(params):
            pair = jnp.concatenate([params["embedding"][inputs.tokens], feature], axis=-1)
            bias = params["fc_bias"][None, None] if self.has_bias else None
            x = linear(pair, params["fc"], transposed=config.transposed, residual=bias)
            return trunk.run_layers(config, params["layers"], x, call, cache)

    def recurrent(self, params: PyTree, output: Array) -> Array:
        return output

    def logits(self, params: PyTree, output: Array) -> Array:
        return trunk.logits(params, output)

    def init_cache(self, num_pages: int, page_size: int, dtype: DTypeLike) -> list:
        return trunk.init_cache(self.config, num_pages, page_size, dtype)


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
