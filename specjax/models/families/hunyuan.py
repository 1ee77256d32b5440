"""Hunyuan dense and Hunyuan-A13B: change Llama by norms of heads that have turned, and by a base that is stretched."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.rope import Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

OF_LENGTHS = "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"  # fields beside `alpha` without effect
OF_LAYERS = "moe_topk", "moe_intermediate_size", "num_shared_expert"  # fields that may have a number for each layer
TRAINING = "moe_drop_tokens", "moe_random_routing_dropped_token"


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense Hunyuan checkpoint."""
    # Files of dense models have the fields of the mixtures, too.
    config.ignore("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
    config.ignore(*(name for name in config.fields if name.startswith("moe_") or "expert" in name))
    return llama.decoder(config, tensors, (LayerConfig(attention(config)),), rope=read_rope)


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Hunyuan-A13B checkpoint."""
    size = config.size("intermediate_size")
    config = config.replaced(**{name: _of_all_layers(config, name) for name in OF_LAYERS})
    config.only("num_shared_expert", 1)
    config.only("moe_intermediate_size", size)
    config.only("moe_layer_num_skipped", 0)
    config.only("norm_topk_prob", True)
    config.ignore(*TRAINING)
    sizes = mixtures.counts(config, "num_experts", "num_local_experts", chosen="moe_topk")
    layer = LayerConfig(attention(config), Experts(mixtures.made(config, SoftmaxTopK, *sizes), shared=Shared()))
    names = mixtures.Names(router="gate.wg", shared="shared_mlp")
    return llama.decoder(config, tensors, (layer,), mixture=names, expert_size=size, shared_size=size, rope=read_rope)


def attention(config: ConfigFile) -> Attention:
    """Return the mixer of all layers."""
    config.only("hidden_act", "silu")
    config.only("use_qk_norm", True)
    config.only("use_cla", False)  # keys and values of earlier layers
    bias = config.get("attention_bias", bool, False)
    return Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True, norms_turned=True)


def read_rope(config: ConfigFile, head_size: int) -> Rope:
    """Return how heads turn: where the table has `alpha`, by a base that is alpha ** (D / (D - 2)) times as large."""
    name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    table = config.table(name)
    alpha = table.number("alpha", None)
    kind = table.get("rope_type" if "rope_type" in table else "type", str, "default")
    if alpha is None or kind != "dynamic":
        return ropes.read(config, head_size, ignored=("alpha",))
    if head_size <= 2:
        raise ValueError(f"{table.where('alpha')} must be absent for heads of {head_size} numbers, got {alpha}")
    (table if "rope_theta" in table.fields else config).refuse_null("rope_theta")
    theta = table.number("rope_theta", config.number("rope_theta", 10000.0))
    table.ignore("rope_type", "type", "original_max_position_embeddings", *OF_LENGTHS)
    table.check_all_read()
    return Rope(theta * alpha ** (head_size / (head_size - 2)))


def _of_all_layers(config: ConfigFile, name: str) -> Any:
    """Return the value of a field, which may be a list of as many equal numbers as there are layers."""
    found = config.fields.get(name)
    if not isinstance(found, list):
        return found
    if len(found) != config.size("num_hidden_layers", most=llama.MAX_LAYERS) or len(set(map(repr, found))) != 1:
        raise ValueError(f"{config.where(name)} must be one number, or the same number for each layer, got {found!r}")
    return found[0]
