"""ERNIE 4.5: changes Llama by numbers of a head that turn together side by side, and by mixtures of experts."""

from dataclasses import dataclass
from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.experts import MIN_SUM, Experts, Shared, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Array, Model

MTP_LAYERS = "model.mtp_*"  # names of the tensors for multi-token prediction


@dataclass(frozen=True)
class Names(mixtures.Names):
    """The names of the tensors of a mixture, whose corrections are a table of one row."""

    def corrections(self, number: int, tensors: Tensors, name: str) -> Array:
        return tensors.in_float32().row(name, 1, number)


read_rope = partial(ropes.read_side_by_side, theta=5e5)


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dense ERNIE 4.5 checkpoint."""
    config.only("hidden_act", "silu")
    bias = config.get("use_bias", bool, False)
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias), GatedMLP(has_bias=bias))
    size = config.unless_null("head_dim", 128)
    return llama.decoder(config, tensors, (layer,), head_size=size, tie_embeddings=True, rope=read_rope)


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of ERNIE 4.5 with experts, without its layer for multi-token prediction."""
    config.only("hidden_act", "silu")
    config.only("use_bias", False)
    config.only("moe_norm_min", MIN_SUM)
    config.ignore("moe_capacity", "moe_gate", "moe_use_aux_free")  # of the training
    sizes = mixtures.counts(config, "moe_num_experts", "num_experts", chosen="moe_k")
    router = mixtures.made(config, SoftmaxTopK, *sizes, has_corrections=True)
    shared = config.size("moe_num_shared_experts", 2, least=0, most=mixtures.MAX_EXPERTS)
    experts = Experts(router, shared=Shared() if shared else None)
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    first = config.size("moe_layer_start_index", 1, least=0)
    last = config.size("moe_layer_end_index", -1, least=-1)
    step = config.size("moe_layer_interval", 1)
    last = number - 1 if last == -1 else last
    is_dense = [not first <= i <= last or (i + 1) % step != 0 for i in range(number)]
    size, correction = config.size("moe_intermediate_size"), "moe_statics.e_score_correction_bias"
    if any(name.endswith(f"gate.{correction}") for name in tensors.names()):
        correction = f"gate.{correction}"  # as transformers 5 writes it
    return llama.decoder(
        config,
        tensors,
        llama.with_dense((LayerConfig(ffn=experts),), GatedMLP(), is_dense),
        tie_embeddings=True,
        mixture=Names(correction=correction),
        expert_size=size,
        shared_size=shared * size,
        rope=read_rope,
        ignored=(MTP_LAYERS,),
    )
