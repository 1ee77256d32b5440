"""GPT-2: OPT's network with another activation, positions from row 0, and matrices whose inputs come first in files."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, opt
from specjax.models.network import network_model
from specjax.models.tensors import Tensors
from specjax.types import Array, Model, PyTree

PREFIX = "transformer."  # in place of "model."


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a GPT-2 checkpoint."""
    config.only("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.only(name, False)
    hidden_size = config.size("n_embd")
    gpt2_config = opt.OPTConfig(
        vocab_size=config.size("vocab_size"),
        embedding_size=hidden_size,
        hidden_size=hidden_size,
        num_layers=config.size("n_layer", most=llama.MAX_LAYERS),
        num_heads=config.size("n_head"),
        head_size=llama.part_of_head(config, "n_embd", "n_head"),
        mlp_size=config.size("n_inner", 4 * hidden_size),
        max_length=config.size("n_positions"),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=llama.activation(config, "activation_function", "gelu_new"),
        position_offset=0,
        tie_embeddings=config.get("tie_word_embeddings", bool, True),
    )
    config.check_computation()
    return network_model(opt.NETWORK, gpt2_config, _params(gpt2_config, tensors.inside(PREFIX)))


def _params(config: opt.OPTConfig, tensors: Tensors) -> PyTree:
    """Read the parameters of OPT's network."""
    hidden, mlp = config.hidden_size, config.mlp_size

    def affine(name: str, inputs: int, outputs: int) -> dict[str, Array]:
        weight = tensors.matrix_of_inputs(f"{name}.weight", inputs, outputs)
        return {"weight": weight, "bias": tensors.vectors({f"{name}.bias": outputs})}

    def norm(name: str) -> dict[str, Array]:
        return opt.norm_params(tensors, name, hidden)

    def layer(name: str) -> PyTree:
        return {
            "attention_norm": norm(f"{name}.ln_1"),
            "qkv": affine(f"{name}.attn.c_attn", hidden, 3 * hidden),
            "attention_out": affine(f"{name}.attn.c_proj", hidden, hidden),
            "mlp_norm": norm(f"{name}.ln_2"),
            "mlp_in": affine(f"{name}.mlp.c_fc", hidden, mlp),
            "mlp_out": affine(f"{name}.mlp.c_proj", mlp, hidden),
        }

    embedding = "model.wte.weight", config.vocab_size, hidden
    params = {
        "embedding": tensors.table(*embedding),
        "position_embedding": tensors.table("model.wpe.weight", config.max_length, hidden),
        "layers": {i: layer(f"model.h.{i}") for i in range(config.num_layers)},
        "norm": norm("model.ln_f"),
    }
    if config.tie_embeddings:
        tensors.check_same("lm_head.weight", *embedding)
    else:
        params["head"] = tensors.table("lm_head.weight", config.vocab_size, hidden)
    tensors.check_all_read("*.attn.bias", "*.attn.masked_bias")  # old files store the causal mask
    return params
