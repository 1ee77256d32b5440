"""bitsandbytes: NF4 or FP4 over the flattened matrix, with scales that may have codes, and int8 with `SCB`."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import StoredLinear, shape_in, unpack_bytes
from specjax.models.quantized import TABLES, Quantized, pack

STATE = ".weight.quant_state.bitsandbytes__"
TYPES = "nf4", "fp4"  # of codes of 4 bits; the name of the state ends with one


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") == "bitsandbytes" or bool(
        config.fields.get("load_in_4bit") or config.fields.get("load_in_8bit")
    )


@dataclass(frozen=True)
class BitsAndBytes:
    """How the files of a checkpoint store matrices of NF4, FP4 or int8."""

    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "BitsAndBytes":
        """Read the table quantization_config.

        Raises:
            ValueError: a field has a wrong value, or is not supported.
        """
        if config.get("load_in_4bit", bool, False):
            config.choice("bnb_4bit_quant_type", TYPES, default=TYPES[0])  # the state of each matrix says it
            config.only("bnb_4bit_quant_storage", "uint8")
        config.get("llm_int8_skip_modules", list, [])
        return cls()

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the matrix is of int8, or of codes in bytes."""
        return linear.has(".weight", "int8", "uint8")

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return shape_in(linear) if linear.has(".weight", "int8") else tuple(_state(linear)[1]["shape"])

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        return self._of_8_bits(linear) if linear.has(".weight", "int8") else self._of_4_bits(linear)

    def _of_8_bits(self, linear: StoredLinear) -> Quantized:
        codes = linear.array(".weight", linear.shape, "int8")
        largest = linear.array(".SCB", (linear.shape[0],), "float32")[:, None]  # the largest number of each output
        codes = np.where(largest == 0, np.int8(0), codes)
        scale = np.where(largest == 0, np.float32(1), largest / np.float32(127))
        return pack(codes, scale, bits=8, dtype=linear.dtype)

    def _of_4_bits(self, linear: StoredLinear) -> Quantized:
        outputs, inputs = linear.shape
        name, state = _state(linear)
        block, code = state.get("blocksize"), state["quant_type"]
        if type(block) is not int or block < 1:
            raise ValueError(f"blocksize in {name} must be a size, got {block!r}")
        if state["shape"] != [outputs, inputs]:
            raise ValueError(f"shape in {name} must be {[outputs, inputs]}, got {state['shape']!r}")
        table = linear.array(".weight.quant_map", (16,), "float32")
        if not np.array_equal(table, TABLES[code]):
            raise ValueError(
                f"tensor {linear.name}.weight.quant_map must be the numbers of {code.upper()}, got {table}"
            )
        size = outputs * inputs
        packed = linear.array(".weight", (-(-size // 2), 1), "uint8").ravel()
        codes = unpack_bytes(packed, high_first=True)[:size].reshape(outputs, inputs)
        scale = _scales(linear, name, state, -(-size // block))
        group = math.gcd(block, inputs)  # blocks may go on in the next row
        scale = _spread(scale, block // group, size // group).reshape(outputs, -1)
        zero = np.uint8(np.flatnonzero(table == 0)[0])
        codes = np.where(np.repeat(scale == 0, group, axis=1), zero, codes)
        scale = np.where(scale == 0, np.float32(1), scale)
        return pack(codes, scale, bits=4, code=code, group=group, dtype=linear.dtype)


def _state(linear: StoredLinear) -> tuple[str, dict[str, Any]]:
    """Return the tensor of the object that the files hold as JSON beside a matrix, for messages, and the object."""
    code = next((kind for kind in TYPES if linear.has(STATE + kind)), TYPES[0])
    name = f"tensor {linear.name}{STATE}{code}"
    content = linear.array(STATE + code, None, "uint8").tobytes()
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from error
    if not isinstance(state, dict) or state.get("quant_type") != code:
        raise ValueError(f"{name} must be an object with quant_type {code!r}, got {state!r}")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        raise ValueError(f"shape in {name} must be two sizes, got {shape!r}")
    return name, state


def _scales(linear: StoredLinear, name: str, state: dict[str, Any], number: int) -> np.ndarray:
    """Return the scale of each block, float32."""
    if "nested_blocksize" not in state:
        return linear.array(".weight.absmax", (number,), "float32")
    codes = linear.array(".weight.absmax", (number,), "uint8")
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block < 1 or type(offset) is not float:
        raise ValueError(
            f"nested_blocksize and nested_offset in {name} must be a size and a number, got {block!r} and {offset!r}"
        )
    table = linear.array(".weight.nested_quant_map", (256,), "float32")
    outer = linear.array(".weight.nested_absmax", (-(-number // block),), "float32")
    return table[codes] * _spread(outer, block, number) + np.float32(offset)


def _spread(scale: np.ndarray, block: int, number: int) -> np.ndarray:
    """Return the scale of each of some numbers, of which a block shares one. A file may say that a block is huge."""
    return scale[np.arange(number) // min(block, number)]
