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
    model = transformers.AutoModelForCausalLM.from_config(config(fields), attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fast ones take few widths of experts
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            tensor.copy_(torch.from_numpy(families.make_tensor(name, tuple(tensor.shape))))
    return model


def stored_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint has: a tied one once."""
    stored = "e_score_correction_bias", "layer_scalar"
    buffers = {name: x for name, x in model.named_buffers() if name.endswith(stored)}
    return dict(model.named_parameters()) | buffers


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Logits [B, T, V] in float32 of right-padded rows."""
    mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    ids = torch.from_numpy(tokens.astype(np.int64))
    return model(input_ids=ids, attention_mask=torch.from_numpy(mask.astype(np.int64))).logits.float().numpy()
