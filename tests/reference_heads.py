"""The heads of the package `speculators` on torch. Only where it is installed."""

import json
from pathlib import Path

import numpy as np
import recorded_heads
import speculators
import speculators.models.peagle.core
import torch
import transformers
from safetensors import safe_open
from speculators.proposals.greedy import GreedyTokenProposalConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

KINDS = {
    "eagle3": (speculators.Eagle3SpeculatorConfig, speculators.Eagle3DraftModel),
    "peagle": (speculators.PEagleSpeculatorConfig, speculators.PEagleDraftModel),
    "dflash": (speculators.DFlashSpeculatorConfig, speculators.DFlashDraftModel),
    "dflash2": (speculators.DFlash2SpeculatorConfig, speculators.DFlash2DraftModel),
    "dspark": (speculators.DSparkSpeculatorConfig, speculators.DSparkDraftModel),
}


def record(case: str, directory: Path) -> tuple[dict, dict]:
    """Return the config.json and the shapes of the tensors that the package writes for a case, and its drafts."""
    kind, layers, layer_fields, fields = recorded_heads.CASES[case]
    config_class, model_class = KINDS[kind]
    sizes = transformers.AutoConfig.for_model(layers, **recorded_heads.LAYERS | layer_fields)
    config = config_class(transformer_layer_config=sizes, speculators_config=about(kind), **fields)
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class(config)
    model.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    written = {"config": json.loads((directory / "config.json").read_text()), "shapes": shapes}
    fill(model, recorded_heads.tensors(shapes))
    logits, drafts = draft(model, kind)
    return written, {"logits": logits, "drafts": drafts}


def about(kind: str) -> speculators.SpeculatorsConfig:
    return speculators.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=recorded_heads.NUM_DRAFTS)],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(name_or_path=None, architectures=[]),
    )


def fill(model: torch.nn.Module, tensors: dict[str, np.ndarray]) -> None:
    """Give a head its tensors, and the target's tables where it has no tables."""
    shared = {f"{name}.weight": table for name, table in recorded_heads.tables().items()}
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if name in tensors or name in shared:
                target.copy_(torch.from_numpy(tensors.get(name, shared.get(name))))
    model.eval()


def load(directory: Path) -> torch.nn.Module:
    """Load a head from its files, and the tables that these have not from the target that they name."""
    config = speculators.SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(directory, config=config).eval()


@torch.no_grad()
def draft(model: torch.nn.Module, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits [K, D] of greedy drafts, and the drafts [K] in the target's vocabulary."""
    rows = {"eagle3": eagle3_rows, "peagle": peagle_rows}.get(kind, block_rows)(model)
    logits, drafts = [], []
    for _ in range(recorded_heads.NUM_DRAFTS):
        row = rows(drafts)
        token = int(row.argmax())
        logits.append(row.numpy())
        drafts.append(token if model.d2t is None else token + int(model.d2t[token]))
    return np.stack(logits), np.array(drafts)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(recorded_heads.tokens()), torch.from_numpy(recorded_heads.taps())


def scored(model: torch.nn.Module, run) -> list[torch.Tensor]:
    """Return all logits that the head computes in a call."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    run()
    hook.remove()
    return found


def eagle3_rows(model: torch.nn.Module):
    """A function of the drafts so far, which gives the logits [D] of the next one."""
    tokens, taps = inputs()

    def row(drafts: list[int]) -> torch.Tensor:
        ids = torch.cat([tokens[1:], torch.tensor(drafts, dtype=torch.long)])[None]
        features = torch.nn.functional.pad(taps, (0, 0, 0, len(drafts)))[None]
        documents = torch.zeros_like(ids)
        last = scored(model, lambda: model(features, ids, documents, ttt_steps=len(drafts) + 1))[-1]
        return last[len(taps) - 1]

    return row


def peagle_rows(model: torch.nn.Module):
    tokens, taps = inputs()
    count, drafts = len(taps), recorded_heads.NUM_DRAFTS
    ids = torch.nn.functional.pad(tokens[1:], (0, drafts))[None]
    features = torch.nn.functional.pad(taps, (0, 0, 0, drafts))[None]
    anchors = torch.cat([torch.arange(count), torch.full((drafts - 1,), count - 1)])
    depths = torch.cat([torch.zeros(count, dtype=torch.long), torch.arange(1, drafts)])
    core = speculators.models.peagle.core
    sample, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: (anchors, depths)
    last_hidden = torch.zeros(*ids.shape, recorded_heads.HIDDEN)
    options = {"num_depths": drafts, "loss_config": {}, "verifier_last_hidden_states": last_hidden}
    compute, core.compute_metrics = core.compute_metrics, lambda **_: (None, None)
    rows = scored(model, lambda: model(features, ids, torch.zeros_like(ids), **options))[0]
    core.generate_cod_sample_indices, core.compute_metrics = sample, compute
    return lambda before: rows[count - 1 + len(before)]


def block_rows(model: torch.nn.Module):
    tokens, taps = inputs()
    size, last = model.block_size, len(taps)
    ids = torch.nn.functional.pad(tokens, (0, size))[None]
    features = torch.nn.functional.pad(taps, (0, 0, 0, size + 1))[None]
    mask = torch.zeros(ids.shape)
    mask[0, last] = 1
    last_hidden = torch.zeros(*ids.shape, recorded_heads.HIDDEN)
    hidden, logits, *_ = model._backbone_forward(features, ids, mask, last_hidden, torch.zeros_like(ids), max_anchors=1)
    shift = 0 if model.config.sample_from_anchor else 1

    def row(drafts: list[int]) -> torch.Tensor:
        index = len(drafts) + shift
        plain, own = logits[0, index], hidden[:, index : index + 1]
        before = torch.tensor([[drafts[-1] if drafts else tokens[-1]]])
        if hasattr(model, "candidate_selector"):
            ids, scores = model.candidate_selector.select(plain[None, None], own, before)
            return torch.full_like(plain, -torch.inf).scatter(0, ids[0, 0], scores[0, 0])
        if getattr(model, "markov_head", None) is None:
            return plain
        return plain + model.markov_head.block_bias(prev_token_ids=before, hidden_states=own)[0, 0]

    return row
