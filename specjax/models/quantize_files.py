"""Write a checkpoint whose matrices have few bits, in the format compressed-tensors, which other engines load."""

import json
import logging
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specjax.models.directory import Checkpoint, check_quantization
from specjax.models.files import model_files
from specjax.models.hub import FILES
from specjax.models.quantized import GROUPS, Quantized, codes_of, quantize
from specjax.models.safetensors_file import DTYPES, read_array, read_header

MATRIX = re.compile(r"(?:.*\.)?layers\.\d+\.(?:.*\.)?(?:\w+_proj|fc1|fc2)\.weight")  # of a layer
FLOATS = ("F32", "BF16", "F16")
NAMES = {dtype: name for name, dtype in DTYPES.items()}

logger = logging.getLogger(__name__)


def write_quantized(model: Checkpoint, out: str | Path, format: str) -> tuple[int, int]:
    """Write a checkpoint in which the matrices of layers have few bits, one tensor after the other.

    The files are in the format compressed-tensors: int8 and int4 as "pack-quantized", fp8 as "float-quantized". Loaded
    again, the checkpoint has the codes and scales that `models.load(directory, quantization=format)` makes. Embeddings,
    head and norms, and matrices whose inputs are no multiple of 32, are copied.

    Args:
        model: the checkpoint, whose weights are floats in safetensors files.
        out: a directory, which is made, or which is empty.
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
    out.mkdir(parents=True, exist_ok=True)
    groups, ignored, weight_map = {}, ["lm_head"], {}
    before = after = 0
    files = model_files(model.directory)
    for path in files:
        header = read_header(path)
        for name, (_, entry) in header.items():
            if MATRIX.fullmatch(name) and len(entry["shape"]) == 2 and entry["dtype"] in FLOATS:
                group = _group_of(entry["shape"][1], format)
                if group is None:
                    ignored.append(name.removesuffix(".weight"))
                else:
                    groups[name] = group
            before += math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        written = _write(path, out / path.name, {name: groups.get(name) for name in header}, format)
        after += sum(written.values())
        weight_map |= dict.fromkeys(written, path.name)
    if not groups:
        raise ValueError(f"{model.directory} must have matrices of layers, which end in _proj, fc1 or fc2, got none")
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = model.config.fields | {"quantization_config": _config(groups, ignored, format)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _copy_others(model, out)
    return before, after


def _check_files(model: Checkpoint) -> None:
    """Raise ValueError for files that are damaged, and for tensors of dtypes that cannot be copied."""
    model.tensors(np.dtype("float32"))  # the package safetensors checks the headers
    for path in model_files(model.directory):
        for name, (_, entry) in read_header(path).items():
            if entry["dtype"] not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"tensor {name} in {path} must be of type {known}, got {entry['dtype']}")


def _group_of(inputs: int, format: str) -> int | None:
    """Return the number of inputs that share a scale, 0 for all; None where a matrix stays as it is."""
    return 0 if format != "int4" else next((size for size in GROUPS if inputs % size == 0), None)


def _config(groups: dict[str, int], ignored: list[str], format: str) -> dict[str, Any]:
    """Return the field quantization_config. The most frequent group takes all matrices that no other group names."""
    layout = "float-quantized" if format == "fp8" else "pack-quantized"
    tables = {}
    for i, (group, _) in enumerate(Counter(groups.values()).most_common()):
        names = [name.removesuffix(".weight") for name, size in groups.items() if size == group]
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
            "format": layout,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": tables,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _write(path: Path, out: Path, groups: dict[str, int | None], format: str) -> dict[str, int]:
    """Write a file with the tensors of another, and return the bytes of each tensor that was written.

    The sizes are known before the numbers, so that the header comes first and one tensor is in memory at a time.
    """
    shapes = {name: entry for name, (_, entry) in read_header(path).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, sizes = 0, {}
    for name, group in groups.items():
        for made, (kind, shape) in _layout(name, shapes[name], group, format).items():
            sizes[made] = math.prod(shape) * DTYPES[kind].itemsize
            header[made] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + sizes[made]]}
            position += sizes[made]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with out.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name, group in groups.items():
            values = read_array(path, name)
            logger.info("%s %s", name, "copied" if group is None else f"rounded to {format}")
            _append(file, {name: values} if group is None else _arrays(name, quantize(values, format)), header)
    return sizes


def _append(file: BinaryIO, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    for name, array in arrays.items():
        found, entry = (NAMES[array.dtype], list(array.shape)), header[name]
        assert found == (entry["dtype"], entry["shape"]), "the header says what is written"
        file.write(np.ascontiguousarray(array).tobytes())


def _layout(name: str, entry: dict[str, Any], group: int | None, format: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of the tensors that stand for a tensor, by name."""
    shape = tuple(entry["shape"])
    if group is None:
        return {name: (entry["dtype"], shape)}
    outputs, inputs = shape
    if format == "fp8":
        return {name: ("F8_E4M3", shape), f"{name}_scale": ("F32", (outputs, 1))}
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
