"""Multi-token prediction: a decoder layer of the target's own checkpoint that guesses one token further ahead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from specjax.models.attention import KeyValues
from specjax.models.directory import Checkpoint
from specjax.models.layer import Attention, LayerConfig, matrix_shape, norm_of
from specjax.models.linear import linear, lookup, rms_norm
from specjax.proposers import trunk
from specjax.proposers.feature_draft import FeatureDraft, feature_draft
from specjax.proposers.files import TargetWeights, num_drafts, open_directory, other_target, target_weights
from specjax.types import Array, Model, ModelInput, PyTree

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.decoder import DecoderConfig
    from specjax.models.tensors import Tensors


@dataclass(frozen=True)
class MTPHead(trunk.FeatureHead):
    """The module of MiMo: one decoder layer on a projection of [hidden state; embedding], each normalised.

    Its output, after a norm, is scored by the target's head and takes the place of the hidden state for the next draft.
    The modules of DeepSeek V3 and Qwen3-Next differ in their projection.
    """

    # Whether the projection is of [embedding; hidden state], and reads the embedding in the first row, too; otherwise
    # zeros stand there.
    is_token_first: bool = False

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the parameters, but for `embedding` and `lm_head`."""
        config, hidden = self.config, self.hidden_size
        norms = {name: (hidden,) for name in ("token_norm", "hidden_norm", "final_norm")}
        return norms | {"fc": matrix_shape(config, 2 * hidden, hidden), "layer": trunk.layer_shapes(config)[0]}

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
        embedded = lookup(params["embedding"], inputs.tokens)
        if not self.is_token_first:  # the first row stands in slot 1
            embedded = jnp.where(inputs.positions[..., None] == 1, 0, embedded)
        with trunk.in_full_precision(params):
            parts = (feature, "hidden_norm"), (embedded, "token_norm")
            parts = parts[::-1] if self.is_token_first else parts
            pair = [rms_norm(x, norm_of(params[name], config)) for x, name in parts]
            x = linear(jnp.concatenate(pair, axis=-1), params["fc"], transposed=config.transposed)
            x, kept = trunk.run_layers(config, {0: params["layer"]}, x, inputs, memories, pick=pick)
            return rms_norm(x, norm_of(params["final_norm"], config)), kept


def mtp(
    head: MTPHead, params: PyTree, num_draft_tokens: int, *, temperature: float | Array | None = None
) -> FeatureDraft:
    """Draft with a module for multi-token prediction, which is run once for each draft.

    Args:
        head: sizes of the module.
        params: its parameters, of the shapes that `head.shapes()` gives, and `embedding` and `lm_head` [V, H], which
            are the target's own.
        num_draft_tokens: K >= 1.
        temperature: the temperature of drafts, as `draft_model` takes it.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: a number is out of its range.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024.

        Xiaomi, MiMo: Unlocking the Reasoning Potential of Language Models, 2025.
    """
    return feature_draft(head, params, num_draft_tokens, None, temperature)


def is_mtp(names: list[str]) -> bool:
    """Return whether tensors of these names have a layer for multi-token prediction."""
    return "model.mtp_layers.0.input_proj.weight" in names


def is_of_target(checkpoint: Checkpoint, target: Model) -> bool:
    """Return whether layers of a checkpoint for multi-token prediction may be made for a target, by their width."""
    fields = checkpoint.config.fields
    fields = fields.get("text_config", fields)
    return isinstance(fields, dict) and fields.get("hidden_size") == target_weights(target).hidden_size


def load_mtp(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft:
    """Load the module for multi-token prediction of a MiMo checkpoint, `model.mtp_layers.0.*`.

    Args:
        directory: the checkpoint, or its directory.
        target: the same checkpoint, as `models.load` loads it.
        num_draft_tokens: K >= 1; None is 8. The module is trained for the first draft; the others reuse it.
        rope_theta: base of the rotary frequencies, in place of the base in config.json.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    from specjax.models.families import llama

    config, tensors = open_directory(directory, target, fields)
    config.only("model_type", "mimo")
    config.only("num_nextn_predict_layers", 1)
    layer = LayerConfig(Attention(has_bias=config.get("attention_bias", bool, True)))
    sizes = llama.config_of(config, (layer,), transposed=tensors.on_one_gpu)
    weights = target_weights(target)
    check_sizes(config, sizes, weights)
    if config.get("use_sliding_window", bool, False):
        raise ValueError(f"{config.where('use_sliding_window')} must be absent or False, got True")
    config.ignore("sliding_window", "max_window_layers")  # which are then not used
    config.check_computation()
    head = MTPHead(replace(sizes, num_layers=1, rope_theta=sizes.rope_theta if rope_theta is None else rope_theta))
    name = "model.mtp_layers.0"
    norms = {"token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "final_norm": "final_layernorm"}
    params = read_params(
        head,
        tensors,
        weights,
        norms={param: f"{name}.{norm}" for param, norm in norms.items()},
        projection=f"{name}.input_proj.weight",
        layer=llama.layer_params(head.config, layer, tensors, name),
    )
    return mtp(head, params, num_drafts(num_draft_tokens), temperature=temperature)


def check_sizes(config: "ConfigFile", sizes: "DecoderConfig", weights: TargetWeights) -> None:
    """Raise ValueError unless the target has the vocabulary and the hidden size of a module."""
    if weights.embedding.shape != (sizes.vocab_size, sizes.hidden_size):
        raise other_target(
            f"target must have the vocabulary and hidden size of {config.path}, {sizes.vocab_size} and "
            f"{sizes.hidden_size}, got {weights.embedding.shape}"
        )


def read_params(
    head: MTPHead,
    tensors: "Tensors",
    weights: TargetWeights,
    *,
    norms: Mapping[str, str],
    projection: str,
    layer: dict[str, Any],
) -> PyTree:
    """Read the parameters of a module, with the embedding and the head of the target.

    Args:
        head: sizes of the module.
        tensors: of the checkpoint.
        weights: of the target.
        norms: for each norm of the module, the name of its tensor without ".weight".
        projection: name of the tensor of the projection.
        layer: the parameters of the layer.
    """
    hidden, config = head.hidden_size, head.config
    return {param: tensors.vectors({f"{name}.weight": hidden}) for param, name in norms.items()} | {
        "fc": tensors.matrices(2 * hidden, {projection: hidden}, transposed=config.transposed),
        "layer": layer,
        "embedding": weights.embedding,
        "lm_head": weights.head,
    }
