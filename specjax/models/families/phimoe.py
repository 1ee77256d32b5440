"""Phi-3.5-MoE: changes Mixtral by norms with means and biases, by its router, and by biases of attention and head."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SparseMixer
from specjax.models.families import llama, mixtral, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

FACTORS = "short_mscale", "long_mscale"  # on cosines and sines of short and of long rows


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Phi-3.5-MoE."""
    config = _with_one_factor(config)
    config.only("hidden_act", "silu")
    nearness = 2 * config.number("router_jitter_noise", 0.01, may_be_zero=True)
    number, chosen = mixtures.counts(config, "num_local_experts", "num_experts")
    config.only("num_experts_per_tok", 2)
    bias = config.get("attention_bias", bool, False)
    router = mixtures.made(config, SparseMixer, number, chosen, nearness=nearness)
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias), Experts(router))
    names = mixtral.names(tensors)
    if "model.layers.0.mlp.router.weight" in tensors:  # as transformers 5 has them in memory
        names = mixtures.Names(router="router")
    return llama.decoder(
        config,
        tensors,
        llama.windowed(layer, (config.size("sliding_window", None),)),
        mixture=names,
        expert_size=config.size("intermediate_size"),
        head_has_bias=config.get("lm_head_bias", bool, False),
        rope=partial(ropes.read, theta=1e6, kinds=("default", "longrope")),
        norms_are_centred=True,
        norms_have_biases=True,
    )


def _with_one_factor(config: ConfigFile) -> ConfigFile:
    """Return the fields with the factor on cosines and sines in the field of other families.

    Raises:
        ValueError: the factors of short and of long rows differ.
    """
    for name in ("rope_scaling", "rope_parameters"):
        table = config.table(name)
        if not any(factor in table for factor in FACTORS):
            continue
        short, long = (table.number(factor) for factor in FACTORS)
        if short != long:
            raise ValueError(f"{table.where('long_mscale')} must be short_mscale = {short}, got {long}")
        others = {key: value for key, value in table.fields.items() if key not in FACTORS}
        config = config.replaced(**{name: others | {"attention_factor": short}})
    return config
