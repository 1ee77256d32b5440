"""Llama 4: changes Llama by parts of a sequence, by layers that do not see positions, and by one expert for a token.

Layers that see positions attend inside parts of a sequence alone. The others see all tokens, and scale queries by
position. The weight of the one expert of a token multiplies its input. Checkpoints are read without the tensors of
their images.
"""

from dataclasses import replace
from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, TopKSigmoid
from specjax.models.families import llama, mixtures, ropes, smollm3
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.rope import NO_ROPE, QueryScaling
from specjax.models.tensors import Tensors
from specjax.types import Model

BLOCK = "feed_forward"
NAMES = mixtures.Names(block=BLOCK, router="router", shared="shared_expert", inputs_first=True)
TYPES = "chunked_attention", "full_attention"  # of layers


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Llama 4 checkpoint, or of the text part of one."""
    config, tensors = text_part(config, tensors)
    config.only("hidden_act", "silu")
    # The files of Llama 4 Scout have an empty list in place of none.
    config = config.replaced(no_rope_layers=config.fields.get("no_rope_layers") or None)
    size = config.size("intermediate_size", 8192)
    experts = Experts(_router(config), shared=Shared(), weighs_inputs=True)
    mixers = _mixers(config)
    ffns = _ffns(config, experts, GatedMLP(size=config.size("intermediate_size_mlp", 16384)), len(mixers))
    return llama.decoder(
        config,
        tensors,
        tuple(LayerConfig(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        head_size=128,
        rope=partial(ropes.read_side_by_side, theta=5e5),
        mixture=NAMES,
        mlp=llama.MLPNames(block=BLOCK),
        expert_size=size,
        shared_size=size,
        ignored=OTHERS,
    )


def _router(config: ConfigFile) -> TopKSigmoid:
    """Return the choice of experts."""
    number, chosen = mixtures.counts(config, "num_local_experts", "num_experts")
    config.only("num_experts_per_tok", 1)  # the inputs of several experts would differ
    return TopKSigmoid(number, chosen)


def _mixers(config: ConfigFile) -> list[Attention]:
    """Return the attention of each layer."""
    turns = smollm3.turns(config)
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias)
    has_norms = config.get("use_qk_norm", bool, True)
    beta, length = config.number("attn_scale", 0.1), config.size("floor_scale", 8192)
    turned = replace(attention, has_unit_norms=has_norms)
    still = replace(attention, rope=NO_ROPE)
    if _scales_queries(config):
        still = replace(still, query_scaling=QueryScaling(beta, length, offset=1))
    chunk = config.size("attention_chunk_size", config.unless_null("attention_chunk_size", 8192))
    kinds = config.strings("layer_types", None)
    if kinds is None:
        kinds = [TYPES[0] if turn and chunk is not None else TYPES[1] for turn in turns]
    if len(kinds) != len(turns) or not set(kinds) <= set(TYPES):
        expected = f"{len(turns)} times {TYPES[0]!r} or {TYPES[1]!r}"
        raise ValueError(f"{config.where('layer_types')} must be {expected}, got {kinds!r}")
    if chunk is None and TYPES[0] in kinds:
        raise ValueError(f"{config.where('attention_chunk_size')} must be a size, as layer_types has {TYPES[0]!r}")
    return [
        replace(turned if turn else still, chunk=chunk if kind == TYPES[0] else None)
        for turn, kind in zip(turns, kinds, strict=True)
    ]


def _scales_queries(config: ConfigFile) -> bool:
    """Return whether layers that do not see positions scale queries; some files have a number in place of true."""
    found = config.fields.get("attn_temperature_tuning", True)
    config.ignore("attn_temperature_tuning")
    if type(found) not in (bool, int):
        raise ValueError(f"{config.where('attn_temperature_tuning')} must be true, false or a number, got {found!r}")
    return bool(found)


def _ffns(config: ConfigFile, experts: Experts, mlp: GatedMLP, number: int) -> list[Experts | GatedMLP]:
    """Return the experts or the MLP of each layer."""
    step = config.size("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers", list, list(range(step - 1, number, step)))
    if not all(type(i) is int and 0 <= i < number for i in sparse):
        raise ValueError(f"{config.where('moe_layers')} must have indices in [0, {number}), got {sparse!r}")
    return [experts if i in sparse else mlp for i in range(number)]
