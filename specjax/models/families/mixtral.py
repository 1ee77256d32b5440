"""Mixtral: changes Mistral by mixtures of experts in all layers."""

from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Mixtral checkpoint."""
    config.only("hidden_act", "silu")
    sizes = mixtures.counts(config, "num_local_experts", "num_experts")
    layer = LayerConfig(ffn=Experts(mixtures.made(config, SoftmaxTopK, *sizes)))
    window = config.size("sliding_window", None)
    layers = llama.windowed(layer, (window,))
    options: dict[str, Any] = {"expert_size": config.size("intermediate_size"), "rope": partial(ropes.read, theta=1e6)}
    return llama.decoder(config, tensors, layers, mixture=names(tensors), **options)


def names(tensors: Tensors) -> mixtures.Names:
    """Return the names of the tensors of experts."""
    # transformers 5 names the block "mlp" where it saves the experts of a layer as one tensor.
    block = "mlp" if "model.layers.0.mlp.gate.weight" in tensors else "block_sparse_moe"
    return mixtures.Names(block, gate="w1", up="w3", down="w2", correction="e_score_correction_bias")
