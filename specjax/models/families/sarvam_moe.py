"""Sarvam 30B: changes GLM-4.5 by heads that turn as a whole and have norms, and by names of tensors and fields."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import glm4_moe, ropes
from specjax.models.tensors import Tensors
from specjax.types import Model

NAMES = {  # parts of the names of tensors in files
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
DEFAULTS = {
    "attention_bias": False,
    "head_dim": 64,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
FIELDS = {  # names of fields in released files, by the names here
    "attention_bias": "use_qkv_bias",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
AS_HERE = {  # fields that say how all models of this type are
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "use_bias": False,
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Sarvam checkpoint."""
    for name, value in AS_HERE.items():
        config.only(name, value)
    released = {name: config.fields[other] for name, other in FIELDS.items() if other in config}
    config = config.with_defaults(**released).with_defaults(**DEFAULTS)
    for name, other in FIELDS.items():
        if other in config:
            config.only(other, config.fields[name])
    rope = partial(ropes.read, theta=8e6, rotary_factor=1.0)
    return glm4_moe.build(config, tensors.renamed(NAMES), rope=rope)
