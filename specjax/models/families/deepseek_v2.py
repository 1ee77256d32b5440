"""DeepSeek V2 Lite: changes DeepSeek V3 by routers of softmax, whose weights are not renormalised."""

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.families import deepseek_v3, llama, mixtures
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a DeepSeek V2 checkpoint whose experts are not in groups."""
    config.only("scoring_func", "softmax")
    config.only("topk_method", "greedy")  # the whole V2 chooses groups first, and scales the weights
    config.only("norm_topk_prob", False)
    config.only("routed_scaling_factor", 1.0)
    config.only("moe_layer_freq", 1)
    config.only("rope_interleave", True)
    config.only("mlp_bias", False)
    config.ignore("n_group", "topk_group")  # only the other method reads them
    sizes = mixtures.counts(config, "n_routed_experts", "num_local_experts")
    experts = Experts(mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=False), shared=Shared())
    layer = deepseek_v3.with_latents(config, experts, query_rank=1536)
    return llama.decoder(
        config,
        tensors,
        mixtures.after_dense(config, layer, 0),
        mixture=mixtures.Names(),
        expert_size=config.size("moe_intermediate_size"),
        shared_size=config.size("moe_intermediate_size") * config.size("n_shared_experts", 2),
    )
