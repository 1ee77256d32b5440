"""Falcon-H1: attention and Mamba-2 side by side in each layer, after one norm, and factors on their inputs and outputs.

A factor on the input of attention is multiplied into its scores and its output, one on the input of Mamba-2 into its
projection.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import granite, llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
OF_MLP = llama.MLPNames("feed_forward")
OUTER = llama.OuterNames(norm="final_layernorm")


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Falcon-H1 checkpoint."""
    config = config.with_defaults(num_key_value_heads=config.unless_null("num_key_value_heads", 8))
    config.only("hidden_act", "silu")
    factor_in = _factor_in(config, "attention_in_multiplier", "attention_bias")
    gate_factor, ffn_factor = config.numbers("mlp_multipliers", 2, [1.0] * 2)
    layer = LayerConfig(
        _attention(config, factor_in),
        GatedMLP(has_bias=config.get("mlp_bias", bool, False), gate_factor=gate_factor),
        mixer_factor=factor_in * config.number("attention_out_multiplier", 1.0),
        ffn_factor=ffn_factor,
        beside=_mamba(config),
        beside_factor=config.number("ssm_out_multiplier", 1.0),
    )
    return llama.decoder(
        config,
        tensors,
        (layer,),
        norms=NORMS,
        mlp=OF_MLP,
        outer=OUTER,
        embedding_factor=config.number("embedding_multiplier", 1.0),
        logit_divisor=1 / config.number("lm_head_multiplier", 1.0),
    )


def _factor_in(config: ConfigFile, name: str, bias: str) -> float:
    """Return the factor on the input of a mixer, whose first projection then has no bias."""
    factor = config.number(name, 1.0)
    if factor != 1 and config.get(bias, bool, False):
        raise ValueError(f"{config.where(bias)} must be False where {name} is not 1, got True with {name} = {factor}")
    return factor


def _attention(config: ConfigFile, factor_in: float) -> Attention:
    """Return the attention, given the factor on its input, which queries, keys and values have."""
    bias, of_scores = config.get("attention_bias", bool, False), factor_in**2 * config.number("key_multiplier", 1.0)
    scale = None if of_scores == 1 else of_scores / llama.size_of_head(config) ** 0.5
    return Attention(has_bias=bias, has_out_bias=bias, scale=scale)


def _mamba(config: ConfigFile) -> Mamba2:
    """Return the mixer beside attention."""
    factor_in = _factor_in(config, "ssm_in_multiplier", "mamba_proj_bias")
    is_gated_last = config.get("mamba_norm_before_gate", bool, config.unless_null("mamba_norm_before_gate", True))
    factors = tuple(factor_in * factor for factor in config.numbers("ssm_multipliers", 5, [1.0] * 5))
    return replace(
        granite.mamba(config, config.size("mamba_d_ssm", config.unless_null("mamba_d_ssm", 1024))),
        has_out_bias=config.get("projectors_bias", bool, False),
        has_norm=config.get("mamba_rms_norm", bool, False),
        is_gated_first=not is_gated_last,
        factors=None if set(factors) == {1.0} else factors,
    )
