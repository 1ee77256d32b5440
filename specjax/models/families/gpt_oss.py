"""gpt-oss: changes Llama by mixtures of experts, sinks of attention, biases, and a window in every other layer."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import ClippedGated, Experts, TopKSoftmax
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

YARN = {  # the scaling of models whose files do not say it
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a gpt-oss checkpoint, whose experts stay in MXFP4 where the files have them so."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, True)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_sinks=True)
    sizes = mixtures.counts(config, "num_local_experts", "num_experts")
    gate = ClippedGated(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702))
    router = mixtures.made(config, TopKSoftmax, *sizes)
    # GGUF has a tensor for each matrix of each expert.
    is_apart = "model.layers.0.mlp.experts.0.gate_proj.weight" in tensors
    experts = Experts(router, gate, has_bias=True, is_interleaved=not is_apart)
    config.ignore("initial_context_length")  # the table of rope has it, too
    config.only("experts_per_token", sizes[1])
    layers = llama.windowed(LayerConfig(attention, experts), llama.windows(config, lambda i: i % 2 == 0, 128))
    if "rope_parameters" not in config and not config.fields.get("rope_scaling"):
        config.fields["rope_scaling"] = None if is_apart else YARN  # a GGUF file says it
    options: dict[str, Any] = {"head_size": 64, "expert_size": config.size("intermediate_size")}
    options["rope"] = partial(ropes.read, theta=150000.0)
    return llama.decoder(config, tensors, layers, mixture=Names(), **options)


@dataclass(frozen=True)
class Names:
    """The names of the tensors of the experts of a layer."""

    def params(self, config: DecoderConfig, ffn: Experts, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of a mixture, as `Experts.shapes` names them.

        Floats are stored with the inputs of a matrix first, codes with the outputs first. Unsloth, whose files are in
        codes of bitsandbytes, has a layer for each matrix of each expert.
        """
        router, experts = f"{layer}.mlp.router", f"{layer}.mlp.experts"
        number, hidden, size = ffn.router.num_experts, config.hidden_size, config.expert_size
        gate_up, down = f"{experts}.gate_up_proj", f"{experts}.down_proj"
        has_layers = f"{gate_up}s.0.weight" in tensors
        router = f"{router}.linear" if has_layers else router
        params = {
            "router": tensors.table(f"{router}.weight", number, hidden),
            "router_bias": tensors.vectors({f"{router}.bias": number}),
        }
        if has_layers:
            gate_ups, downs = ([f"{name}s.{i}" for i in range(number)] for name in (gate_up, down))
            return params | {
                "experts_gate_up": tensors.stack(hidden, [{f"{one}.weight": 2 * size} for one in gate_ups]),
                "experts_gate_up_bias": tensors.rows([f"{one}.bias" for one in gate_ups], 2 * size),
                "experts_out": tensors.stack(size, [{f"{one}.weight": hidden} for one in downs]),
                "experts_out_bias": tensors.rows([f"{one}.bias" for one in downs], hidden),
            }
        params["experts_out_bias"] = tensors.table(f"{down}_bias", number, hidden)
        if not ffn.is_interleaved:
            parts = [f"{experts}.{name}" for name in ("gate_proj", "up_proj")]
            return params | {
                **mixtures.Names().experts(config, number, tensors, f"{layer}.mlp"),
                "experts_gate_up_bias": tensors.side_by_side(number, {f"{part}_bias": size for part in parts}),
            }
        return params | {
            "experts_gate_up_bias": tensors.table(f"{gate_up}_bias", number, 2 * size),
            "experts_gate_up": tensors.stacked(gate_up, number, 2 * size, hidden, transposed=True),
            "experts_out": tensors.stacked(down, number, hidden, size, transposed=True),
        }
