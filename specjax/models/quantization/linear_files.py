"""The stored arrays of one matrix, with checks of their shapes and dtypes, and the packings that several formats share.

Here nothing is read before it is asked for: which arrays a matrix has is known from the headers of the files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specjax.models.quantized import Quantized

FLOATS = ("float32", "bfloat16", "float16")
# Names of arrays of the cache and of the numbers of attention, of which `cache_dtype` reads some.
OF_ATTENTION = (
    *("*.k_scale", "*.v_scale", "*.kv_scale", "*.q_scale", "*.output_scale", "*.prob_output_scale"),
    *("*.k_zero_point", "*.v_zero_point", "*.q_zero_point"),
)


class Entry(Protocol):
    """An array in a file, of which the shape and dtype are known before it is read."""

    @property
    def name(self) -> str: ...  # in the file
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...  # name of the NumPy dtype
    @property
    def place(self) -> str: ...  # "tensor NAME in FILE", for messages
    def read(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredLinear:
    """The arrays of a matrix W [N, K] in the files of a checkpoint.

    Args:
        name: name of the matrix, as "model.layers.0.mlp.up_proj".
        shape: N and K, after the axes of a stack of matrices; as the config of the model has them. It is not needed
            for `Scheme.shape`.
        find: gives the array of a name, None where the files have none.
        dtype: of the floats for which the matrix stands.
        inputs_first: whether the files have the inputs of the matrices of a stack before the outputs.
    """

    name: str
    shape: tuple[int, ...]
    find: Callable[[str], Entry | None]
    dtype: np.dtype
    inputs_first: bool = False

    def has(self, ending: str, *dtypes: str) -> bool:
        """Return whether the files have the array with this ending of its name, of one of some dtypes if any are given.

        Args:
            ending: suffix after the name of the matrix, as ".weight_scale".
            dtypes: names of dtypes of NumPy.
        """
        entry = self.find(self.name + ending)
        return entry is not None and (not dtypes or entry.dtype in dtypes)

    def stored_name(self, *endings: str) -> str:
        """Return the name that the matrix has in the files, given endings of arrays of which they have one."""
        for ending in endings:
            if (entry := self.find(self.name + ending)) is not None:
                return entry.name.removesuffix(ending)
        return self.name

    def entry(self, ending: str) -> Entry:
        """Return an array that is not read yet; raise ValueError if it is missing."""
        entry = self.find(self.name + ending)
        if entry is None:
            raise ValueError(f"tensor {self.name}{ending} is missing, which the quantised matrix {self.name} needs")
        return entry

    def array(self, ending: str, shape: tuple[int, ...] | None, *dtypes: str) -> np.ndarray:
        """Read an array.

        Args:
            ending: suffix after the name of the matrix.
            shape: the shape that the array must have, None for any.
            dtypes: names of the dtypes of which the array must have one.

        Raises:
            ValueError: the array is missing, or has another shape or dtype.
        """
        entry = self.entry(ending)
        if shape is not None and entry.shape != shape:
            raise ValueError(f"{entry.place} must have shape {shape} for a matrix {self.shape}, got {entry.shape}")
        if entry.dtype not in dtypes:
            raise ValueError(f"{entry.place} must be of dtype {' or '.join(dtypes)}, got {entry.dtype}")
        return entry.read()

    def of_stack(self, ending: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """Read an array [E, N, K] of a stack, which the files may have as [E, K, N].

        Raises:
            ValueError: as `array` does.
        """
        if not self.inputs_first:
            return self.array(ending, shape, *dtypes)
        number, outputs, inputs = shape
        return np.ascontiguousarray(self.array(ending, (number, inputs, outputs), *dtypes).swapaxes(1, 2))

    def scales_of_stack(self, ending: str) -> np.ndarray:
        """Read scales [E, N, 1] of a stack [E, N, K] as floats; the file may have one number, or one of each matrix.

        Raises:
            ValueError: the array is missing, or has another shape or dtype.
        """
        number, outputs, _ = self.shape
        stored, whole = self.entry(ending).shape, (number, outputs, 1)
        each = {(): (1, 1, 1), (1,): (1, 1, 1), (number,): (number, 1, 1), (number, outputs): whole}
        each |= {(number, 1, 1): (number, 1, 1), (number, 1, outputs): whole, whole: whole}
        scale = self.array(ending, stored if stored in each else whole, *FLOATS)
        return np.broadcast_to(scale.reshape(each[stored]), whole).copy()

    def scale(self, ending: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """Read scales of this shape; where the file has a single number, it is the scale of all.

        Raises:
            ValueError: as `array` does.
        """
        entry = self.find(self.name + ending)
        if entry is not None and entry.shape in ((), (1,), (1, 1)):
            return np.broadcast_to(self.array(ending, None, *dtypes).reshape(1, 1), shape).copy()
        return self.array(ending, shape, *dtypes)

    def check(self, weight: Quantized) -> Quantized:
        """Return a matrix that was read; raise ValueError unless it has the shape that the config says."""
        if weight.shape != self.shape:
            raise ValueError(f"the quantised matrix {self.name} must have shape {self.shape}, got {weight.shape}")
        return weight


@dataclass(frozen=True)
class ArrayEntry:
    """An `Entry` that is in memory."""

    array: np.ndarray
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    @property
    def place(self) -> str:
        return f"tensor {self.name}"

    def read(self) -> np.ndarray:
        return self.array


def in_memory(
    name: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray], dtype: np.dtype, inputs_first: bool = False
) -> StoredLinear:
    """Return a matrix whose arrays are given by their names."""

    def find(full: str) -> ArrayEntry | None:
        return ArrayEntry(arrays[full], full) if full in arrays else None

    return StoredLinear(name, shape, find, dtype, inputs_first)


def shape_in(linear: StoredLinear, ending: str = ".weight", codes: int = 1) -> tuple[int, ...]:
    """Return the shape of a matrix whose codes lie in an array, `codes` in each of its elements along the inputs."""
    stored = linear.entry(ending).shape
    *outer, size = (*stored[:-2], stored[-1], stored[-2]) if linear.inputs_first else stored
    return *outer, size * codes


def unpack(words: np.ndarray, bits: int, size: int, axis: int = -1) -> np.ndarray:
    """Return the codes in words of 32 bits, the first in the lowest bits.

    Args:
        words: int32, of which each has 32 / bits codes along the axis.
        bits: 4 or 8.
        size: number of codes along the axis; those beyond it are padding.
        axis: the axis.

    Returns:
        uint8 codes.
    """
    words = np.moveaxis(words, axis, -1)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    codes = codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :size]
    return np.ascontiguousarray(np.moveaxis(codes, -1, axis))


def unpack_bytes(packed: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Return the codes of 4 bits in bytes [..., B] as uint8 [..., 2 B], the first in the low half of a byte or not."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return np.stack(halves, axis=-1).reshape(*packed.shape[:-1], -1)


def signed(codes: np.ndarray) -> np.ndarray:
    """Return codes of 8 bits, stored as q + 128, as int8 q."""
    return (codes ^ np.uint8(128)).view(np.int8)


def num_groups(size: int, group: int | None) -> int:
    """Return how many groups of inputs a row of `size` codes has; the last may be shorter. None is one group."""
    return 1 if group is None else -(-size // group)


def order_of(linear: StoredLinear, ending: str, group: int) -> np.ndarray | None:
    """Return the order [K] of inputs that makes each group contiguous; None where the groups are contiguous already.

    Args:
        linear: the matrix.
        ending: of the name of the array with the group of each input, [K] int32.
        group: number of inputs of a group.

    Raises:
        ValueError: the array is missing, or its groups have not the size of a group.
    """
    size = linear.shape[1]
    groups = linear.array(ending, (size,), "int32", "int64").astype(np.int64)
    contiguous = np.arange(size) // group
    if np.array_equal(groups, contiguous):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], contiguous):
        raise ValueError(f"tensor {linear.name}{ending} must name groups of {group} inputs each, got other sizes")
    return order.astype(np.int32)
