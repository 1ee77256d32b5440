"""Record what transformers and speculators compute on the small checkpoints of tests/families.py and recorded_heads.py.

    pip install ".[test,hf]" torch datasets hs-connectors pydantic-settings loguru
    pip install --no-deps speculators==0.9.0
    python scripts/record_goldens.py

The script writes shapes.json, logits.npz and mtp.npz for the models, hybrids.json and hybrids.npz for hybrids, and
heads.json and heads.npz for the drafters, to tests/goldens, and prints the largest logit of each.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import assistants
import families
import hybrids
import recorded_heads


def main() -> None:
    families.GOLDENS.mkdir(exist_ok=True)
    record_models()
    record_hybrids()
    record_heads()


def record_models() -> None:
    import reference
    import reference_assistants
    import transformers

    shapes, logits = {"transformers": {transformers.__version__: []}}, {}
    for case, config in families.ALL.items():
        model = reference.make_model(config)
        shapes[case] = {name: list(tensor.shape) for name, tensor in reference.stored_tensors(model).items()}
        logits[case] = reference.logits(model, families.tokens(), families.LENGTHS)
        print(f"{case}: logits up to {np.abs(logits[case]).max():.2f}, transformers {transformers.__version__}")
    for case in assistants.CASES:
        stored = reference_assistants.stored_tensors(reference_assistants.make_model(case))
        shapes[f"assistant_{case}"] = {name: list(tensor.shape) for name, tensor in stored.items()}
        logits[f"assistant_{case}"] = reference_assistants.logits(case)
    (families.GOLDENS / "shapes.json").write_text(json.dumps(shapes, indent=0) + "\n")
    np.savez_compressed(families.GOLDENS / "logits.npz", **logits)
    models = {case: reference.make_model(families.ALL[case]) for case in families.MTP}
    layers = {case: reference.mtp_logits(model, families.tokens()[0]) for case, model in models.items()}
    np.savez_compressed(families.GOLDENS / "mtp.npz", **layers)


def record_hybrids() -> None:
    import reference
    import transformers

    shapes, logits = {}, {}
    for case, config in hybrids.CONFIGS.items():
        model = reference.make_model(config)
        shapes[case] = {name: list(tensor.shape) for name, tensor in reference.stored_tensors(model).items()}
        logits[case] = reference.logits(model, hybrids.tokens(), (hybrids.NUM_TOKENS,))
        print(f"{case}: logits up to {np.abs(logits[case]).max():.2f}, transformers {transformers.__version__}")
    shapes["transformers"] = {transformers.__version__: []}
    (families.GOLDENS / "hybrids.json").write_text(json.dumps(shapes, indent=0) + "\n")
    case = hybrids.MTP
    of_module = hybrids.nemotron_mtp_shapes(case)
    logits[f"{case}_mtp"] = reference.nemotron_mtp_logits(hybrids.CONFIGS[case], of_module, hybrids.tokens()[0])
    np.savez_compressed(families.GOLDENS / "hybrids.npz", **logits)


def record_heads() -> None:
    import reference_heads

    written, numbers = {}, {}
    for case in recorded_heads.CASES:
        with tempfile.TemporaryDirectory() as directory:
            written[case], found = reference_heads.record(case, Path(directory))
        numbers |= {f"{case}.{name}": values for name, values in found.items()}
        version = written[case]["config"]["speculators_version"]
        print(f"{case}: logits up to {found['logits'].max():.2f}, speculators {version}")
    (families.GOLDENS / "heads.json").write_text(json.dumps(written, indent=0) + "\n")
    np.savez_compressed(families.GOLDENS / "heads.npz", **numbers)


if __name__ == "__main__":
    main()
