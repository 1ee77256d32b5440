"""Record the logits of transformers on the small checkpoints of tests/families.py.

    pip install ".[models,hf]" torch
    python scripts/record_goldens.py

The script writes shapes.json and logits.npz to tests/goldens, and prints the largest logit of each checkpoint.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import families


def main() -> None:
    import reference
    import torch

    families.GOLDENS.mkdir(exist_ok=True)
    shapes, logits = {}, {}
    for case, config in families.CONFIGS.items():
        model = reference.make_model(config)
        shapes[case] = {name: list(tensor.shape) for name, tensor in reference.stored_tensors(model).items()}
        logits[case] = reference.logits(model, families.tokens(), families.LENGTHS)
        print(f"{case}: logits up to {np.abs(logits[case]).max():.2f}, torch {torch.__version__}")
    (families.GOLDENS / "shapes.json").write_text(json.dumps(shapes, indent=0) + "\n")
    np.savez_compressed(families.GOLDENS / "logits.npz", **logits)


if __name__ == "__main__":
    main()
