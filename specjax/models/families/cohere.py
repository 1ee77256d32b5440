"""Command R, Command A and Aya: change Llama by attention and MLP side by side, and by norms that subtract the mean.

Both read the same norm of the stream, the numbers of a head that turn together stand side by side, and logits have a
factor. The models of `cohere2`, from Command R7B on, have windows in most layers; the others do not see positions.
Its successors from Command A+ on, `cohere2_moe`, have experts in most layers, and may have norms that keep the mean.
"""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SoftmaxTopK, TopKSigmoid
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
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
PATTERNS = {"prefix_dense_": 1, "": 4}  # defaults of a field for the first layers of Command A+, and for the others


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Command R, Command R+ or Aya."""
    attention = _attention(config, has_norms=config.get("use_qk_norm", bool, False))
    rope = _rope(config, 5e5)
    # Command R was trained on more positions than max_position_embeddings says.
    length = config.size("model_max_length", config.size("max_position_embeddings"))
    config = config.replaced(max_position_embeddings=length)
    return _decoder(config, tensors, (LayerConfig(attention, is_parallel=True),), rope)


def build_second(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Command R7B, Command A or their successors."""
    pattern = config.size("sliding_window_pattern", 4)
    types = llama.layer_types(config, lambda i: (i + 1) % pattern != 0)
    mixers, rope = _by_type(config, types)
    return _decoder(config, tensors, tuple(LayerConfig(mixers[kind], is_parallel=True) for kind in types), rope)


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of Command A+, whose first layers may have an MLP in place of experts."""
    if "rope_scaling" in config:  # transformers has the field, and does not use it
        raise config.refused("rope_scaling")
    config = config.with_defaults(head_dim=128, first_k_dense_replace=0)
    size, first = config.size("intermediate_size"), config.size("first_k_dense_replace", least=0)
    of_first, of_others = (config.size(f"{part}sliding_window_pattern", n) for part, n in PATTERNS.items())

    def slides(i: int) -> bool:
        return (i + 1) % of_first != 0 if i < first else (i - first + 1) % of_others != 0

    types = llama.layer_types(config, slides)
    mixers, rope = _by_type(config, types)
    of_mlps = mixers | {"full_attention": _attention(config)} if of_first == 1 else mixers  # all of these turn
    ffns = [one.ffn for one in mixtures.by_types(config, LayerConfig(ffn=_experts(config)))]
    ffns *= len(types) // len(ffns)
    layers = tuple(
        LayerConfig((of_mlps if isinstance(ffn, GatedMLP) else mixers)[kind], ffn, is_parallel=True)
        for kind, ffn in zip(types, ffns, strict=True)
    )
    return _decoder(
        config.replaced(intermediate_size=config.size("prefix_dense_intermediate_size", size)),
        tensors,
        layers,
        rope,
        norms_are_centred="rms_norm_eps" not in config,
        mixture=mixtures.Names(),
        expert_size=size,
        shared_size=_num_shared(config) * size,
    )


def _experts(config: ConfigFile) -> Experts:
    """Return the mixture of the layers of `cohere2_moe` that have experts."""
    config.refuse_null("norm_topk_prob")
    sizes, is_renormalized = mixtures.counts(config, "num_experts"), config.get("norm_topk_prob", bool, True)
    if config.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "softmax":
        router = SoftmaxTopK(*sizes)  # which is renormalised whatever the file says
    else:
        router = TopKSigmoid(*sizes, is_renormalized=is_renormalized)
    combined = config.choice("shared_expert_combination_strategy", ("average", "sum"), "average")
    if not _num_shared(config):
        return Experts(router)
    return Experts(router, shared=Shared(), factor=0.5 if combined == "average" else 1.0)


def _num_shared(config: ConfigFile) -> int:
    """Return the number of experts whose MLP every token passes through."""
    return config.size("num_shared_experts", 0, least=0, most=mixtures.MAX_EXPERTS)


def _by_type(config: ConfigFile, types: tuple[str, ...]) -> tuple[dict[str, Attention], Rope]:
    """Return the mixers of the layers of each type, and how the heads of those with windows turn."""
    for name, value in AS_HERE.items():
        config.only(name, value)
    rope = _rope(config, 1e4)
    turns = {"full_attention": NO_ROPE, "sliding_attention": rope}
    return llama.mixers_by_type(config, _attention(config), types, turns, 4096), rope


def _attention(config: ConfigFile, *, has_norms: bool = False) -> Attention:
    """Return the mixer of all layers, with norms of heads or without."""
    bias = config.get("attention_bias", bool, False)
    return Attention(has_bias=bias, has_out_bias=bias, has_head_norms=has_norms, norms_by_head=has_norms)


def _rope(config: ConfigFile, theta: float) -> Rope:
    """Return how heads turn, given the default of the base."""
    return ropes.read_side_by_side(config, llama.size_of_head(config), theta=theta)


def _decoder(
    config: ConfigFile,
    tensors: Tensors,
    layers: tuple[LayerConfig, ...],
    rope: Rope,
    norms_are_centred: bool = True,
    **options: Any,
) -> Model:
    """Build the model, given the description of each layer or one of all layers, and more of `llama.decoder`."""
    config.only("hidden_act", "silu")
    config.refuse_null("layer_norm_eps", "logit_scale")
    if norms_are_centred:
        config = llama.with_epsilon(config, "layer_norm_eps")
    return llama.decoder(
        config,
        tensors,
        layers,
        tie_embeddings=True,
        norms=NORMS,
        rope=rope,
        norms_are_centred=norms_are_centred,
        logit_divisor=1 / config.number("logit_scale", 0.0625),
        **options,
    )
