"""The assistants of Gemma 4 on torch, with the target of families.py. Only where transformers is installed."""

import copy

import assistants
import families
import numpy as np
import reference
import torch
import transformers


def make_model(case: str) -> transformers.PreTrainedModel:
    """An assistant with weights by `assistants.make_tensor`."""
    fields = copy.deepcopy(assistants.CASES[case])
    text = transformers.AutoConfig.for_model(**fields.pop("text_config"))
    config = transformers.AutoConfig.for_model(text_config=text, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            tensor.copy_(torch.from_numpy(assistants.make_tensor(name, tuple(tensor.shape))))
    return model


def stored_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    buffers = {name: x for name, x in model.named_buffers() if name.endswith(("layer_scalar", "token_ordering"))}
    return dict(model.named_parameters()) | buffers


@torch.no_grad()
def logits(case: str) -> np.ndarray:
    """Logits [K, V] of greedy drafts after the first row of `families.tokens`; tokens that have none have -inf."""
    target, model = reference.make_model(families.ALL[assistants.TARGET]), make_model(case)
    ids = torch.from_numpy(families.tokens()[:1].astype(np.int64))
    output = target(input_ids=ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    window, kept = assistants.TEXT["sliding_window"], dict(output.shared_kv_states)
    kept["sliding_attention"] = tuple(x[:, :, -window:] for x in kept["sliding_attention"])  # as its cache has them
    token, hidden, rows = ids[:, -1:], output.hidden_states[-1][:, -1:], []
    for _ in range(assistants.NUM_DRAFTS):
        pair = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
        positions = torch.tensor([[ids.shape[1] - 1]])
        drafted = model(inputs_embeds=pair, position_ids=positions, shared_kv_states=kept, attention_mask=None)
        row, token, hidden = drafted.logits[0, -1], drafted.logits.argmax(dim=-1), drafted.last_hidden_state
        rows.append(
            torch.where(row == row.min(), -torch.inf, row)
            if "use_ordered_embeddings" in assistants.CASES[case]
            else row
        )
    return torch.stack(rows).numpy()
