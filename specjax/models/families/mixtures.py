"""Parts that the families with mixtures of experts share: their sizes, and how their files name the experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts, Router, Shared, SigmoidTopK
from specjax.models.families import llama
from specjax.models.layer import GatedMLP, LayerConfig
from specjax.models.tensors import Tensors

MAX_EXPERTS = 4096
TRAINING = "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "output_router_logits"


def counts(config: ConfigFile, *names: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """Return the number of experts, from the first of some fields that the config has, and how many a token chooses.

    The field with the second number is `chosen`.

    Raises:
        ValueError: a field is missing or not in range.
    """
    config.ignore(*TRAINING)  # only training reads these fields
    name = next((name for name in names if name in config), names[0])
    number = config.size(name, most=MAX_EXPERTS)
    for other in names:
        config.only(other, number)
    return number, config.size(chosen, most=number)


def dense_layers(config: ConfigFile, num_layers: int) -> list[bool]:
    """Return for each layer whether it has an MLP in place of experts, as the files of Qwen say it."""
    dense, step = config.get("mlp_only_layers", list, []), config.size("decoder_sparse_step", 1)
    return [i in dense or (i + 1) % step != 0 for i in range(num_layers)]


def made(config: ConfigFile, router: type[Router], *sizes: int, **options: Any) -> Router:
    """Return a router; an error names the file."""
    try:
        return router(*sizes, **options)
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error


def sigmoid_experts(
    config: ConfigFile, *, scale: float = 1.0, num_groups: int = 1, num_chosen_groups: int = 1
) -> Experts:
    """Return the mixture that GLM-4.5 and DeepSeek V3 have, beside an MLP that every token passes through.

    Args:
        config: config.json.
        scale: default of the field routed_scaling_factor.
        num_groups: default of the field n_group.
        num_chosen_groups: default of the field topk_group.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    config.refuse_null("norm_topk_prob")
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    names = "n_routed_experts", "num_local_experts"
    router = sigmoid_router(config, *names, scale=scale, num_groups=num_groups, num_chosen_groups=num_chosen_groups)
    return Experts(router, shared=Shared())


def sigmoid_router(
    config: ConfigFile, *names: str, scale: float, num_groups: int = 1, num_chosen_groups: int = 1
) -> Router:
    """Return DeepSeek's router; `names` are as in `counts`, and the other arguments as in `sigmoid_experts`."""
    return made(
        config,
        SigmoidTopK,
        *counts(config, *names),
        is_renormalized=config.get("norm_topk_prob", bool, True),
        scale=config.number("routed_scaling_factor", scale),
        num_groups=config.size("n_group", num_groups),
        num_chosen_groups=config.size("topk_group", num_chosen_groups),
    )


def widths(config: ConfigFile) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` with the widths of an expert and of the MLP beside the experts."""
    size = config.size("moe_intermediate_size")
    return {"expert_size": size, "shared_size": config.size("n_shared_experts", 1, most=MAX_EXPERTS) * size}


def after_dense(config: ConfigFile, layer: LayerConfig, default: int) -> tuple[LayerConfig, ...]:
    """Return the description of each layer, of which the first ones have an MLP in place of experts.

    Args:
        config: config.json.
        layer: the description of the others.
        default: of the field first_k_dense_replace, the number of layers with an MLP.
    """
    num_layers = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    number = config.size("first_k_dense_replace", min(default, num_layers), least=0, most=num_layers)
    return llama.with_dense((layer,), GatedMLP(), [i < number for i in range(num_layers)])


def by_types(config: ConfigFile, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """Return the description of each layer, as mlp_layer_types says it; without it the first one has an MLP."""
    if "mlp_layer_types" not in config:
        return after_dense(config, layer, 1)
    num_layers, types = config.size("num_hidden_layers", most=llama.MAX_LAYERS), config.strings("mlp_layer_types")
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise ValueError(
            f"{config.where('mlp_layer_types')} must be {num_layers} times 'dense' or 'sparse', got {types!r}"
        )
    return llama.with_dense((layer,), GatedMLP(), [kind == "dense" for kind in types])


def mtp_layers(config: ConfigFile) -> tuple[str, ...]:
    """Return the names of the tensors of the layers for multi-token prediction, which follow the others."""
    first = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    number = config.size("num_nextn_predict_layers", 1, least=0, most=llama.MAX_LAYERS)
    return tuple(f"model.layers.{i}.*" for i in range(first, first + number))


@dataclass(frozen=True)
class Names:
    """The names of the tensors of a mixture, in a layer."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    correction: str = "gate.e_score_correction_bias"
    inputs_first: bool = False  # whether one tensor for all experts has the inputs of a matrix first

    def params(self, config: DecoderConfig, ffn: Experts, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of a mixture, as `Experts.shapes` names them.

        The files have a tensor for each matrix of each expert, or one for all that transformers 5 writes.

        Args:
            config: the sizes.
            ffn: the mixture.
            tensors: the tensors.
            layer: prefix of the names.

        Raises:
            ValueError: a tensor is missing, or has a wrong shape or dtype.
        """
        block, number = f"{layer}.{self.block}", ffn.router.num_experts
        params = {"router": tensors.table(f"{block}.{self.router}.weight", number, config.hidden_size)}
        params |= self.experts(config, number, tensors, block)
        if "router_correction" in ffn.router.shapes():
            params["router_correction"] = self.corrections(number, tensors, f"{block}.{self.correction}")
        return params | self._shared(config, ffn, tensors, block)

    def corrections(self, number: int, tensors: Tensors, name: str) -> Any:
        """Read the numbers [experts] that are added for the choice, in float32, given the name of their tensor."""
        return tensors.in_float32().vectors({name: number})

    def experts(self, config: DecoderConfig, number: int, tensors: Tensors, block: str) -> dict[str, Any]:
        """Read the matrices of the experts of a block, given their number."""
        hidden, size, experts = config.hidden_size, config.expert_size, f"{block}.experts"
        stacked = partial(tensors.stacked, transposed=self.inputs_first)
        if f"{experts}.gate_up_proj" in tensors:
            return {
                "experts_gate_up": stacked(f"{experts}.gate_up_proj", number, 2 * size, hidden),
                "experts_out": stacked(f"{experts}.down_proj", number, hidden, size),
            }
        of = [f"{experts}.{i}" for i in range(number)]
        both = [{f"{one}.{name}.weight": size for name in (self.gate, self.up)} for one in of]
        return {
            "experts_gate_up": tensors.stack(hidden, both),
            "experts_out": tensors.stack(size, [{f"{one}.{self.down}.weight": hidden} for one in of]),
        }

    def _shared(self, config: DecoderConfig, ffn: Experts, tensors: Tensors, block: str) -> dict[str, Any]:
        """Read the parameters of the MLP beside the experts, if there is one."""
        if ffn.shared is None:
            return {}
        hidden, size, turned = config.hidden_size, config.shared_size, config.transposed
        shared = f"{block}.{self.shared}"
        gate_up = {f"{shared}.{name}.weight": size for name in ("gate_proj", "up_proj")}
        params = {
            "shared_gate_up": tensors.matrices(hidden, gate_up, transposed=turned),
            "shared_out": tensors.matrices(size, {f"{shared}.down_proj.weight": hidden}, transposed=turned),
        }
        if ffn.shared.is_gated:
            params["shared_gate"] = tensors.table(f"{shared}_gate.weight", 1, hidden)
        return params
