"""The language model in a checkpoint that takes images or audio, too."""

from specjax.models.config_file import ConfigFile
from specjax.models.tensors import Tensors

PREFIXES = "language_model.model.", "model.language_model."  # in place of "model.", before transformers 4.52 and after
OTHERS = (  # names of tensors that text does not pass through
    "vision_tower.*",
    "model.vision_tower.*",
    "vision_model.*",
    "model.vision_model.*",
    "visual.*",
    "model.visual.*",
    "multi_modal_projector.*",
    "model.multi_modal_projector.*",
    "mm_projector.*",
    "model.embed_vision.*",
    "model.audio_tower.*",
    "model.embed_audio.*",
)


def text_part(config: ConfigFile, tensors: Tensors) -> tuple[ConfigFile, Tensors]:
    """Return the fields and the tensors of the language model in a checkpoint that may have other parts, too."""
    if "text_config" not in config:
        return config, tensors
    text = config.table("text_config")
    text.fields = {**text.fields, "quantization_config": None}  # `Checkpoint.scheme` has read it
    names = tensors.names()
    if "tie_word_embeddings" in config:
        is_tied = config.get("tie_word_embeddings", bool)
        if is_tied != text.get("tie_word_embeddings", bool, is_tied):  # transformers 5 writes both; the tensors decide
            is_tied = not any(name.endswith("lm_head.weight") for name in names)
        text.fields["tie_word_embeddings"] = is_tied
    found = [prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in names)]
    return text, tensors.inside(found[0]) if found else tensors
