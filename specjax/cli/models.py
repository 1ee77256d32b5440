"""The arguments of all commands that run models, and the models that they name."""

import argparse
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.validation import suggestion

if TYPE_CHECKING:
    from specjax.engine.llm import LLM

logger = logging.getLogger(__name__)


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which models run, and how."""
    add = command.add_argument
    add("--model", help="Hugging Face checkpoint of the target, a directory or org/name; default: the embedded family")
    add(
        "--draft",
        metavar="MODEL",
        help="checkpoint of the draft, with the same vocabulary, or of a drafter on the model's features; or ngram; "
        "or self, a copy of the model in few bits; or mtp, the layer for multi-token prediction in the model's files",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights; default: that of the checkpoint, or float32 on a CPU",
    )
    add(
        "--quantization",
        choices=("int8", "int4", "fp8"),
        help="round the matrices of the model's layers when they are read; default: keep them as they are stored",
    )
    add("--draft-quantization", choices=("int8", "int4", "fp8"), help="likewise for the checkpoint of --draft")
    add(
        "--cache-dtype",
        choices=("fp8",),
        help="dtype of the keys and values of the model and of a draft model; default: that of the weights",
    )
    add(
        "--verifier",
        choices=("rejection", "block", "match", "typical"),
        default="rejection",
        help="default: rejection; typical is lossy",
    )
    add(
        "--tree",
        type=_numbers,
        metavar="N",
        help="draft a tree of N nodes, the last token among them; with auto also several, as 8,32; default: a chain",
    )
    add(
        "--drafts-per-row",
        type=int,
        metavar="N",
        help="verify N drafts of each sequence on average, the likeliest of all together; default: all drafts",
    )
    add("--max-length", type=int, metavar="N", help="maximum number of tokens, with the prompt")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share the model; default: 1")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, for the same command in several processes")
    add("--num-processes", type=int, metavar="N", help="number of processes; default: that of Slurm or Open MPI")
    add(
        "--process-id", type=int, metavar="I", help="number of this process, from 0; default: that of Slurm or Open MPI"
    )
    add(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds in which all processes must start; default: 300",
    )
    add(
        "--compilation-cache",
        metavar="DIR",
        help="folder for compiled programs; default: in the user's cache directory",
    )
    add(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_const",
        const=False,
        help="compile anew at every start",
    )


def add_draft_length_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say how many drafts a step has."""
    command.add_argument(
        "--num-draft-tokens",
        type=_int_or_auto,
        metavar="K",
        help="draft tokens per step, or auto, which chooses them before each step; 0: plain decoding; default: 4, or "
        "auto with --step-times",
    )
    command.add_argument(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="seconds of steps by which auto chooses, written by specjax tune; default: measured once and kept",
    )


def _int_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or auto, got {text!r}") from None


def add_engine_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the models and their names."""
    add_model_arguments(command)
    add = command.add_argument
    add(
        "--served-model-name",
        "--name",
        dest="names",
        action="append",
        metavar="NAME",
        help="what requests call the model; may be repeated; default: the name of its directory, or specjax",
    )
    add("--any-model-name", action="store_true", help="let requests call the model by any name")
    add_draft_length_arguments(command)


def _numbers(text: str) -> list[int]:
    """Return the integers of a text such as "8,32"."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be one or more integers, as 16 or 8,32, got {text!r}") from None


def load_llm(args: argparse.Namespace) -> "LLM":
    """Load the models that the arguments of `add_model_arguments` name."""
    from specjax import verifiers
    from specjax.engine.llm import LLM

    _check_platform()
    names = "dtype", "max_length", "tensor_parallel", "quantization", "draft_quantization", "cache_dtype", "tree"
    options: dict[str, Any] = {name: getattr(args, name) for name in (*names, "drafts_per_row")}
    options |= {"verifier": getattr(verifiers, args.verifier), "compilation_cache": args.compilation_cache}
    num_draft_tokens, step_times = args.num_draft_tokens, getattr(args, "step_times", None)  # not of every command
    if num_draft_tokens is None:
        num_draft_tokens = 4 if step_times is None else "auto"
    llm = LLM(args.model, args.draft, num_draft_tokens, step_times=step_times, **options)
    if step_times is not None:
        warn_of_other_times(step_times, args.model, args.draft)
    return llm


def warn_of_other_times(path: str, model: str | None, draft: str | None) -> None:
    """Warn where a file of `specjax tune` was measured with other models than a run has, or on another device."""
    measured = json.loads(Path(path).read_text(encoding="utf-8"))
    device = jax.devices()[0].device_kind
    for name, here in (("model", model), ("draft", draft), ("device", device)):
        if (there := measured.get(name, here)) != here:
            message = "%s has the times of steps with %s %s, and this run has %s: drafts may not pay as it says"
            logger.warning(message, path, name, there or "the default", here or "the default")


def _check_platform() -> None:
    """Raise ValueError where JAX has no device of the platform that the environment asks for."""
    try:
        jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        hint = suggestion(asked, ["cpu", "cuda", "rocm", "tpu"])
        raise ValueError(f"JAX has no device of JAX_PLATFORMS={asked}{hint} ({error})") from error


def load(args: argparse.Namespace) -> "LLM":
    """Load the models, and say on standard error where a target has no drafter."""
    llm = load_llm(args)
    if args.draft is None and args.num_draft_tokens != 0 and not llm.proposer.num_draft_tokens:
        choices = "--draft ngram, a head trained for the model, or a small model of its family"
        logger.warning("no --draft is given, so %s decodes plainly; give %s", args.model, choices)
    return llm
