"""The models of transformers on torch, with the weights of families.py. Only where both are installed."""

import copy

import families
import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def config(fields: dict) -> transformers.PretrainedConfig:
    """The config of these fields, among them `model_type`."""
    return transformers.AutoConfig.for_model(**copy.deepcopy(fields))  # it writes into the tables that it is given


def make_model(fields: dict) -> transformers.PreTrainedModel:
    """A model of the config, with weights by `families.make_tensor`."""
    make = transformers.AutoModelForCausalLM.from_config
    if fields["model_type"] == "mistral4":  # the auto class has none for the text part alone
        make = transformers.Mistral4ForCausalLM._from_config
    model = make(config(fields), attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fast ones take few widths of experts
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            tensor.copy_(torch.from_numpy(families.make_tensor(name, tuple(tensor.shape))))
    return model


def stored_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint has: a tied one once."""
    stored = "e_score_correction_bias", "expert_bias", "layer_scalar"
    buffers = {name: x for name, x in model.named_buffers() if name.endswith(stored)}
    return dict(model.named_parameters()) | buffers


@torch.no_grad()
def mtp_logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits [T - 1, V] of the layer for multi-token prediction after each token of a sequence [T] but the first."""
    from transformers.modeling_layers import MtpModel

    module, name = MtpModel(model, 1).eval(), f"model.layers.{model.config.num_hidden_layers}"
    layer = module.layers[0]
    layer.config._attn_implementation = "eager"
    own = {"post_norm.weight": "shared_head.norm.weight"}
    stored = dict(layer.named_parameters()) | {n: x for n, x in layer.named_buffers() if n.endswith("correction_bias")}
    for part, tensor in stored.items():
        of_file = f"{name}.{own.get(part, part.removeprefix('mtp_block.'))}"
        tensor.copy_(torch.from_numpy(families.make_tensor(of_file, tuple(tensor.shape))))
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    hidden = model.model(input_ids=ids).last_hidden_state
    positions = torch.arange(1, ids.shape[1])[None]
    output = module.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    return module._project_to_logits(output)[0].float().numpy()


@torch.no_grad()
def nemotron_mtp_logits(fields: dict, shapes: dict[str, tuple[int, ...]], tokens: np.ndarray) -> np.ndarray:
    """Logits [T - 1, V] of the module for multi-token prediction of Nemotron, as `mtp_logits` returns them.

    transformers has no such module: a Nemotron of two layers reads the projection in place of embeddings.
    """
    main, module = make_model(fields), make_model(fields | {"hybrid_override_pattern": "*E", "num_hidden_layers": 2})
    module.lm_head.weight.copy_(main.lm_head.weight)
    own = {"model.norm_f.weight": "mtp.layers.1.final_layernorm.weight"}
    for part, tensor in stored_tensors(module).items():
        name = own.get(part, part.replace("model.layers.", "mtp.layers."))
        if name in shapes:
            tensor.copy_(torch.from_numpy(families.make_tensor(name, tuple(tensor.shape))))

    def of_file(name: str) -> torch.Tensor:
        return torch.from_numpy(families.make_tensor(name, shapes[name]))

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + fields["layer_norm_epsilon"])
        return x * scale * of_file(f"mtp.layers.0.{name}.weight")

    ids = torch.from_numpy(tokens[None].astype(np.int64))
    hidden = main.model(input_ids=ids).last_hidden_state[:, :-1]
    embedded = main.get_input_embeddings()(ids[:, 1:])
    pair = torch.cat([normed(embedded, "enorm"), normed(hidden, "hnorm")], dim=-1)
    x = pair @ of_file("mtp.layers.0.eh_proj.weight").T
    return module(inputs_embeds=x).logits[0].float().numpy()


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Logits [B, T, V] in float32 of right-padded rows."""
    mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    ids = torch.from_numpy(tokens.astype(np.int64))
    return model(input_ids=ids, attention_mask=torch.from_numpy(mask.astype(np.int64))).logits.float().numpy()
