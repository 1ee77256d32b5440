"""Write a checkpoint whose matrices have few bits, in the format compressed-tensors, which other engines load."""

import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from specjax.models.directory import Checkpoint, check_quantization
from specjax.models.files import shards_of
from specjax.models.hub import FILES
from specjax.models.quantized import GROUPS, Quantized, codes_of, format_of, quantize
from specjax.models.safetensors_file import DTYPES, read_array, read_header

MATRIX = re.compile(  # of a layer, and what stands beside the layers of small Gemma 4 and of OPT
    r"(?:.*\.)?(?:layers\.\d+\.(?:.*\.)?"
    r"(?:\w+_proj|kv_a_proj_with_mqa|in_proj_\w+|dense(?:_\w+)?|query_key_value|c_fc|fc1|fc2|w[123]"
    r"|shared_mlp\.(?:in|out)put_linear|per_layer_input_gate|per_layer_projection)"
    r"|h\.\d+\.\w+\.(?:dense(?:_\w+)?|query_key_value)"
    r"|per_layer_model_projection|project_in|project_out)\.weight"
)
COPIED = re.compile(  # of the towers for images and sound; and what makes keys of latents, which `load` keeps as floats
    r"(?:model\.)?(?:vision_tower|vision_model|audio_tower|visual)\..*|.*\.kv_b_proj\.weight"
)
STACK_OF_GRANITE = re.compile(r"(?:.*\.)?block_sparse_moe\.(?:in|out)put_linear\.weight")
STACK = re.compile(  # of all experts of a layer
    r"(?:.*\.)?layers\.\d+\.(?:.*\.)?experts\.(?:gate_up_proj|up_proj|down_proj)"
)
AS_MIXTRAL = "granitemoe_swa", "mixtral", "minimax_m2"  # families whose files name experts alike
INPUTS_FIRST = "llama4", "llama4_text", "qwen3_vl_moe"  # families in whose stacks the inputs of a matrix come first
FLOATS = ("F32", "BF16", "F16")
NAMES = {dtype: name for name, dtype in DTYPES.items()}

logger = logging.getLogger(__name__)


def write_quantized(model: Checkpoint, out: str | Path, format: str) -> tuple[int, int]:
    """Write a checkpoint in which the matrices of layers have few bits, one tensor after the other.

    The files are in the format compressed-tensors: int8 and int4 as "pack-quantized", fp8 as "float-quantized". Loaded
    again, the checkpoint has the codes and scales that `models.load(directory, quantization=format)` makes. A stack of
    the matrices of experts becomes matrices with the names that other engines know. Embeddings, head, routers and
    norms, the projections to the rates of gated delta nets, the matrix that makes keys and values of latents, and
    towers for images and sound are copied, and so are stacks that have biases, as gpt-oss has. In int4 matrices whose
    inputs are no multiple of 32 are copied, too.

    Args:
        model: the checkpoint, whose weights are floats in safetensors files.
        out: a directory, which is made, or which is empty, as it is again after an error.
        format: "int8", a scale for each output; "int4", a scale and a zero for each 128, 64 or 32 inputs; or "fp8",
            e4m3 with a scale for each output.

    Returns:
        The bytes of the tensors before and after.

    Raises:
        FileNotFoundError: a file of the checkpoint does not exist.
        ValueError: the directory is not empty, the weights are quantised already or are no safetensors files, or the
            format is unknown.
    """
    out = Path(out)
    check_quantization("format", format)
    if model.scheme is not None or model.directory.is_file():
        raise ValueError(f"the weights of {model.directory} must be floats in safetensors files, to be rounded")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out must be a new or an empty directory, got {str(out)!r}")
    _check_files(model)
    with _empty_after_errors(out):
        return _fill(model, out, format)


@contextmanager
def _empty_after_errors(out: Path) -> Iterator[None]:
    """Make a directory, and empty it after an error, which may leave files that are whole and files that are not."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in out.iterdir():
            path.unlink()
        if is_new:
            out.rmdir()
        raise


def _fill(model: Checkpoint, out: Path, format: str) -> tuple[int, int]:
    """Write the files of `write_quantized`, and return the bytes of all tensors before and after."""
    rounded, ignored, weight_map = {}, ["lm_head"], {}
    before = after = 0
    files = shards_of(model.directory, "model.safetensors")
    names = {name for path in files for name in read_header(path)}
    for path in files:
        header = read_header(path)
        parts = {}
        for name, (_, entry) in header.items():
            rounding, ndim, family = None, len(entry["shape"]), model.config.get("model_type", str)
            is_stack = STACK.fullmatch(name) and ndim == 3 and f"{name}_bias" not in names
            is_matrix = is_stack or (MATRIX.fullmatch(name) and ndim == 2 and not COPIED.fullmatch(name))
            if is_matrix and entry["dtype"] in FLOATS:
                is_turned = is_stack and family in INPUTS_FIRST
                rounding = _rounding_of(name, entry["shape"][-2 if is_turned else -1], format)
            parts[name] = [Part(_in_layout(name, family), ..., tuple(entry["shape"]), None)]
            if is_stack or rounding is not None:
                parts[name] = _matrices(name, tuple(entry["shape"]), rounding, family)
            if rounding is not None:
                rounded |= {part.name: rounding for part in parts[name]}
            elif (ndim == 2 and name.endswith(".weight")) or STACK.fullmatch(name):
                ignored += [part.name.removesuffix(".weight") for part in parts[name]]
            before += math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        written = _write(path, out / path.name, parts)
        after += sum(written.values())
        weight_map |= dict.fromkeys(written, path.name)
    if not rounded:
        raise ValueError(f"{model.directory} must have matrices of layers, as those that end in _proj, got none")
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = model.config.fields | {"quantization_config": _config(rounded, list(dict.fromkeys(ignored)))}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _copy_others(model, out)
    return before, after


def _check_files(model: Checkpoint) -> None:
    """Raise ValueError for files that are damaged, and for tensors of dtypes that cannot be copied."""
    files = shards_of(model.directory, "model.safetensors")
    model.tensors(np.dtype("float32"))  # the package safetensors checks the headers
    for path in files:
        for name, (_, entry) in read_header(path).items():
            if entry["dtype"] not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"tensor {name} in {path} must be of type {known}, got {entry['dtype']}")
            if STACK_OF_GRANITE.fullmatch(name):
                raise ValueError(
                    f"tensor {name} in {path} must not be a stack of Granite's experts, because other engines have no "
                    "names for their codes; `quantization` of `load` rounds them"
                )


class Rounding(NamedTuple):
    """How a matrix is rounded."""

    format: str
    group: int  # inputs that share a scale, 0 for all


def _rounding_of(name: str, inputs: int, format: str) -> Rounding | None:
    """Return how a matrix is rounded where others are rounded to `format`; None where it stays as it is."""
    own = format_of(name, inputs, format)
    if own != "int4":
        return None if own is None else Rounding(own, 0)
    group = next((size for size in GROUPS if inputs % size == 0), None)
    return None if group is None else Rounding(own, group)


def _config(rounded: dict[str, Rounding], ignored: list[str]) -> dict[str, Any]:
    """Return the field quantization_config. The most frequent group takes all matrices that no other group names."""
    tables = {}
    for i, (rounding, _) in enumerate(Counter(rounded.values()).most_common()):
        format, group = rounding
        names = [name.removesuffix(".weight") for name, own in rounded.items() if own == rounding]
        weights = {
            "num_bits": 4 if format == "int4" else 8,
            "type": "float" if format == "fp8" else "int",
            "symmetric": format != "int4",
            "strategy": "group" if group else "channel",
            "group_size": group or None,
            "dynamic": False,
        }
        tables[f"group_{i}"] = {
            "targets": names if i else ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "float-quantized" if format == "fp8" else "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": tables["group_0"]["format"],
        "quantization_status": "compressed",
        "config_groups": tables,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


class Part(NamedTuple):
    """A tensor that is written: a part of a stored tensor."""

    name: str  # of the tensor, or of the matrix of floats if it is rounded
    place: Any  # index of the stored tensor
    shape: tuple[int, ...]
    rounding: Rounding | None  # None: the tensor is copied
    is_turned: bool = False  # whether the stored matrix has its inputs first


def _in_layout(name: str, family: str) -> str:
    """Return the name of a tensor where experts have matrices of their own; transformers 5 renames Mixtral's."""
    return name.replace(".mlp.", ".block_sparse_moe.") if family in AS_MIXTRAL else name


def _matrices(name: str, shape: tuple[int, ...], rounding: Rounding | None, family: str) -> list[Part]:
    """Return the matrices of a tensor, [N, K] or a stack [E, N, K] of the experts' matrices."""
    if len(shape) == 2:
        return [Part(_in_layout(name, family), ..., shape, rounding)]
    is_turned = family in INPUTS_FIRST
    number, outputs, inputs = (shape[0], shape[2], shape[1]) if is_turned else shape
    block, kind = _in_layout(name, family).rsplit(".", 1)
    gate, up, down = ("w1", "w3", "w2") if family in AS_MIXTRAL else ("gate_proj", "up_proj", "down_proj")
    half = outputs // 2
    rows = {up if kind == "up_proj" else down: slice(0, outputs)}
    if kind == "gate_up_proj":
        rows = {gate: slice(0, half), up: slice(half, outputs)}
    return [
        Part(
            f"{block}.{i}.{part}.weight",
            (i, slice(None), place) if is_turned else (i, place),
            (place.stop - place.start, inputs),
            rounding,
            is_turned,
        )
        for i in range(number)
        for part, place in rows.items()
    ]


def _write(path: Path, out: Path, parts: dict[str, list[Part]]) -> dict[str, int]:
    """Write a file with the tensors of another, and return the bytes of each tensor that was written.

    The sizes are known before the numbers, so that the header comes first and one tensor is in memory at a time.
    """
    kinds = {name: entry["dtype"] for name, (_, entry) in read_header(path).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, sizes = 0, {}
    for name, part in ((name, part) for name, own in parts.items() for part in own):
        for made, (kind, shape) in _layout(part, kinds[name]).items():
            sizes[made] = math.prod(shape) * DTYPES[kind].itemsize
            header[made] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + sizes[made]]}
            position += sizes[made]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with out.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name, own in parts.items():
            values = read_array(path, name)
            how = own[0].rounding
            logger.info("%s %s", name, "copied" if how is None else f"rounded to {how.format}")
            for part in own:
                value = values[part.place].T if part.is_turned else values[part.place]
                try:
                    arrays = {part.name: value} if how is None else _arrays(part.name, quantize(value, how.format))
                except ValueError as error:
                    raise ValueError(f"tensor {name} in {path}: {error}") from error
                _append(file, arrays, header)
    return sizes


def _append(file: BinaryIO, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    for name, array in arrays.items():
        found, entry = (NAMES[array.dtype], list(array.shape)), header[name]
        assert found == (entry["dtype"], entry["shape"]), "the header says what is written"
        file.write(np.ascontiguousarray(array).tobytes())


def _layout(part: Part, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of the tensors that stand for a part of a tensor of a dtype, by name."""
    name = part.name
    if part.rounding is None:
        return {name: (dtype, part.shape)}
    (outputs, inputs), (format, group) = part.shape, part.rounding
    if format == "fp8":
        return {name: ("F8_E4M3", part.shape), f"{name}_scale": ("F32", (outputs, 1))}
    in_word, number = 32 // (4 if format == "int4" else 8), inputs // group if group else 1
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}_packed": ("I32", (outputs, -(-inputs // in_word))),
        f"{name}_scale": ("BF16" if format == "int4" else "F32", (outputs, number)),
        f"{name}_shape": ("I64", (2,)),
    }
    return layout | ({f"{name}_zero_point": ("I32", (-(-outputs // 8), number))} if format == "int4" else {})


def _arrays(name: str, weight: Quantized) -> dict[str, np.ndarray]:
    """Return the tensors that stand for a matrix, by name."""
    codes, scale = np.asarray(codes_of(weight)), np.asarray(weight.scale)
    if weight.code == "e4m3":
        return {name: codes, f"{name}_scale": scale}
    codes = codes if weight.bits == 4 else codes.view(np.uint8) ^ np.uint8(128)
    arrays = {
        f"{name}_packed": pack_words(codes, weight.bits),
        f"{name}_scale": scale,
        f"{name}_shape": np.array(weight.shape, np.int64),
    }
    if weight.zero is not None:
        arrays[f"{name}_zero_point"] = pack_words(np.asarray(weight.zero).astype(np.uint8).T, weight.bits).T
    return arrays


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes [N, K] uint8 in words [N, K bits / 32] int32, rounded up, the first code in the lowest bits."""
    in_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % in_word))).reshape(len(codes), -1, in_word)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(padded.astype(np.uint32) << shifts, axis=-1).view(np.int32)


def _copy_others(model: Checkpoint, out: Path) -> None:
    """Copy the tokenizer and the settings of a checkpoint, which may have its tokenizer beside its directory."""
    names = [name for name in FILES if "*" not in name and "safetensors" not in name and name != "config.json"]
    paths = [model.directory / name for name in names]
    if model.tokenizer_path is not None:
        paths.append(model.tokenizer_path)
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, out / path.name)
