"""MiniCPM3: changes Llama by attention on latents, and by factors on embeddings, sublayers and logits."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import deepseek_v3, llama
from specjax.models.layer import GatedMLP
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a MiniCPM3 checkpoint."""
    config.refuse_null("scale_emb")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    config = config.with_defaults(v_head_dim=hidden // heads).replaced(rope_interleave=False)
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    layer = deepseek_v3.with_latents(config, ffn, query_rank=768)
    root = config.size("num_hidden_layers", most=llama.MAX_LAYERS) ** 0.5
    depth = config.number("scale_depth", config.unless_null("scale_depth", 1.4))
    factor = 1.0 if depth is None else depth / root
    base = config.size("dim_model_base", config.unless_null("dim_model_base", 256))
    return llama.decoder(
        config,
        tensors,
        (replace(layer, mixer_factor=factor, ffn_factor=factor),),
        tie_embeddings=True,
        embedding_factor=tensors.rounded(config.number("scale_emb", 12.0)),
        logit_divisor=1.0 if base is None else hidden / base,
    )
