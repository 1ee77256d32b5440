"""Mistral Small 4: changes DeepSeek V3 by routers of softmax, and by queries that are scaled by position."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import deepseek_v3, llama, mixtures, ropes
from specjax.models.rope import QueryScaling
from specjax.models.tensors import Tensors
from specjax.types import Model

YARN = {  # the rotation of models whose files do not say it
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OTHER_FIELDS = "llama_4_scaling_beta", "max_position_embeddings"  # of the table that do not say how heads turn


def query_scaling(rope: ConfigFile) -> QueryScaling | None:
    """Return how queries are scaled by position, from the table of the rotation; None where its factor is zero."""
    beta = rope.number("llama_4_scaling_beta", may_be_zero=True)
    length = rope.size("original_max_position_embeddings")
    return QueryScaling(beta, length) if beta else None


def build_text(config: ConfigFile, tensors: Tensors, ignored: tuple[str, ...] = ()) -> Model:
    """Build the model of a Mistral Small 4 checkpoint, or of the text part of one, as `mistral.build` does."""
    config.refuse_null("norm_topk_prob")
    config = config.with_defaults(rope_parameters=YARN)
    key_size, rope_size = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    rope = config.table("rope_parameters")
    rope.only("partial_rotary_factor", rope_size / (key_size + rope_size))
    rest = {name: value for name, value in rope.fields.items() if name != "partial_rotary_factor"}
    config = config.replaced(rope_parameters=rest)
    scaling = query_scaling(rope)
    for name in ("n_group", "topk_group"):
        config.only(name, 1)
    config.only("routed_scaling_factor", 1.0)
    sizes = mixtures.counts(config, "n_routed_experts", "num_local_experts")
    renormalized = config.get("norm_topk_prob", bool, True)
    experts = Experts(mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=renormalized), shared=Shared())
    layer = deepseek_v3.with_latents(config, experts, query_rank=1024)
    return llama.decoder(
        config,
        tensors,
        mixtures.after_dense(config, layer, 0),
        mixture=mixtures.Names(),
        query_scaling=scaling,
        rope=partial(ropes.read, ignored=OTHER_FIELDS),
        ignored=ignored,
        **mixtures.widths(config),
    )
