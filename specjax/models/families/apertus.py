"""Apertus: changes Llama by MLPs without a gate, whose activation xIELU is learned by layer, and by norms of heads."""

from functools import partial

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import MLP, XIELU, XIELU_BETA, XIELU_EPSILON, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
THETA = 12e6
ROPE = {  # of files without a table
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONSTANTS = {".act_fn.beta": XIELU_BETA, ".act_fn.eps": XIELU_EPSILON}  # by the ends of their names in files


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an Apertus checkpoint."""
    config.only("hidden_act", "xielu")
    config.only("qk_norm", True)
    for name in ("post_norm", "mlp_bias"):
        config.only(name, False)
    if "rope_parameters" not in config and "rope_scaling" not in config:
        config.refuse_null("rope_scaling")
        config.only("rope_theta", THETA)  # versions of transformers differ about others
        config = config.with_defaults(rope_scaling=ROPE)
    _check_constants(tensors)
    bias = config.get("attention_bias", bool, False)
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True), MLP(XIELU))
    return llama.decoder(config, tensors, (layer,), norms=NORMS, rope=partial(ropes.read, theta=THETA))


def _check_constants(tensors: Tensors) -> None:
    """Read the constants of activations, which files may have; raise ValueError where they are others."""
    for name in tensors.names():
        expected = next((value for end, value in CONSTANTS.items() if name.endswith(end)), None)
        if expected is None:
            continue
        value = tensors.numbers(name)
        if not np.allclose(value, expected, rtol=0.01, atol=0):  # in few bits
            raise ValueError(f"tensor {name} must be {expected}, the only value that specjax supports, got {value}")
