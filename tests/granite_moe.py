"""Small checkpoints of Granite 3 with experts, with the names of tensors that released files have."""

from families import FACTORS, LLAMA, make_tensor, shapes

FIELDS = LLAMA | FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20}
CONFIGS = {
    "granitemoe": FIELDS | {"model_type": "granitemoe"},
    "granitemoeshared": FIELDS | {"model_type": "granitemoeshared", "shared_intermediate_size": 24},
}


def tensors(case: str) -> dict:
    """Tensors by name, made by `families.make_tensor`."""
    found = {
        name: shape for name, shape in shapes("llama").items() if ".mlp." not in name and ".self_attn." not in name
    }
    for i in range(2):
        for part, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "block_sparse_moe.router.layer": (6, 32),
            "block_sparse_moe.input_linear": (6, 40, 32),
            "block_sparse_moe.output_linear": (6, 32, 20),
            "shared_mlp.input_linear": (48, 32),
            "shared_mlp.output_linear": (32, 24),
        }.items():
            if case == "granitemoeshared" or not part.startswith("shared_mlp"):
                found[f"model.layers.{i}.{part}.weight"] = shape
    return {name: make_tensor(name, shape) for name, shape in found.items()}
