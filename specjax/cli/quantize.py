"""The command `specjax quantize`."""

import argparse
from pathlib import Path
from typing import Any


def add_quantize(commands: Any) -> None:
    """Add the command."""
    quantize = commands.add_parser(
        "quantize",
        help="write a checkpoint with matrices of few bits",
        description="Write a checkpoint whose matrices have few bits, in the format compressed-tensors, which other "
        "engines load. Embeddings, head and norms stay as they are.",
    )
    quantize.set_defaults(run=_quantize, command="quantize", extra="models")
    add = quantize.add_argument
    add("model", metavar="MODEL", help="checkpoint with weights of floats, a directory or org/name")
    add("--format", choices=("int8", "int4", "fp8"), required=True, help="int4 has a scale for 128, 64 or 32 inputs")
    add("--out", type=Path, required=True, metavar="DIR", help="new directory of the checkpoint")


def _quantize(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from specjax.models.directory import Checkpoint
    from specjax.models.hub import find_checkpoint
    from specjax.models.quantize_files import write_quantized

    before, after = write_quantized(Checkpoint(find_checkpoint("model", args.model)), args.out, args.format)
    print(f"{args.out}: {after / 1e6:,.1f} MB of weights in place of {before / 1e6:,.1f} MB")
    return 0
