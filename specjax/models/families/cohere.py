"""Command R, Command A and Aya: change Llama by attention and MLP side by side, and by norms that subtract the mean.

Both read the same norm of the stream, the numbers of a head that turn together stand side by side, and logits have a
factor. The models of `cohere2`, from Command R7B on, have windows in most layers; the others do not see positions.
"""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.rope import NO_ROPE, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {"attention_norm": "input_layernorm"}
AS_HERE = {  # fields of released files that say how all models of `cohere2` are
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Command R, Command R+ or Aya."""
    attention = _attention(config, has_norms=config.get("use_qk_norm", bool, False))
    rope = _rope(config, 5e5)
    # Command R was trained on more positions than max_position_embeddings says.
    length = config.size("model_max_length", config.size("max_position_embeddings"))
    return _decoder(config.replaced(max_position_embeddings=length), tensors, [attention], rope)


def build_second(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Command R7B, Command A or their successors."""
    for name, value in AS_HERE.items():
        config.only(name, value)
    pattern = config.size("sliding_window_pattern", 4)
    types = llama.layer_types(config, lambda i: (i + 1) % pattern != 0)
    rope = _rope(config, 1e4)
    turns = {"full_attention": NO_ROPE, "sliding_attention": rope}
    mixers = llama.mixers_by_type(config, _attention(config), types, turns, 4096)
    return _decoder(config, tensors, [mixers[kind] for kind in types], rope)


def _attention(config: ConfigFile, *, has_norms: bool = False) -> Attention:
    """Return the mixer of all layers, with norms of heads or without."""
    bias = config.get("attention_bias", bool, False)
    return Attention(has_bias=bias, has_out_bias=bias, has_head_norms=has_norms, norms_by_head=has_norms)


def _rope(config: ConfigFile, theta: float) -> Rope:
    """Return how heads turn, given the default of the base."""
    return ropes.read_side_by_side(config, llama.size_of_head(config), theta=theta)


def _decoder(config: ConfigFile, tensors: Tensors, mixers: list[Attention], rope: Rope) -> Model:
    """Build the model, given the mixer of each layer, or one of all layers."""
    config.only("hidden_act", "silu")
    config.refuse_null("logit_scale")
    config = llama.with_epsilon(config, "layer_norm_eps")
    return llama.decoder(
        config,
        tensors,
        tuple(LayerConfig(mixer, is_parallel=True) for mixer in mixers),
        tie_embeddings=True,
        norms=NORMS,
        rope=rope,
        norms_are_centred=True,
        logit_divisor=1 / config.number("logit_scale", 0.0625),
    )
