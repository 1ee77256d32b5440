"""Where the numbers of a tensor lie in a GGUF file, and how converters changed them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specjax.models.gguf.blocks import GROUP, KEPT, floats_of, matrix_of
from specjax.models.gguf.header import Entry, Header
from specjax.models.quantized import Quantized


@dataclass(frozen=True)
class Place:
    """A tensor, or a part of one, in a file."""

    entry: Entry
    own_shape: tuple[int, ...] | None = None  # in transformers, where it is not the entry's
    rows: np.ndarray | None = None  # the row of the file that each row is; None: the order is the same
    blocks: np.ndarray | None = None  # the block of inputs that each block is, where all inputs are in so many blocks
    change: Callable[[np.ndarray], np.ndarray] | None = None  # of the numbers of a vector; None for none
    scale: float | None = None  # of the matrix, in NVFP4; None is none

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in transformers."""
        return self.entry.shape if self.own_shape is None else self.own_shape

    @property
    def kind(self) -> str:
        """The name of the type of the numbers."""
        return self.entry.kind.name

    @property
    def is_kept(self) -> bool:
        """Whether a matrix stays in codes."""
        return self.kind in KEPT

    def bytes_of(self, header: Header, index: slice) -> np.ndarray:
        """Return the bytes of some rows, [rows, bytes of a row]."""
        content = header.bytes_of(self.entry)
        return np.asarray(content[index] if self.rows is None else content[self.rows[index]])

    def floats(self, header: Header, index: tuple) -> np.ndarray:
        """Return a part of the tensor as floats."""
        shape, kind = self.shape, self.kind
        if len(shape) == 1:
            values = floats_of(np.ascontiguousarray(header.bytes_of(self.entry)), kind).ravel()
            values = values if self.rows is None else values[self.rows]
            return (values if self.change is None else self.change(values))[index]
        first, *rest = index
        rows = floats_of(self.bytes_of(header, first), kind, self.scale)
        if self.blocks is not None:
            rows = _in_order(rows, self.blocks)
        return rows.reshape(-1, *shape[1:])[(slice(None), *rest)]

    def matrix(self, header: Header, dtype: np.dtype) -> Quantized:
        """Return the matrix of codes.

        Raises:
            ValueError: a scale is infinite or NaN, or a block of inputs has other inputs than whole groups.
        """
        matrix = matrix_of(self.bytes_of(header, slice(None)), self.kind, dtype, self.scale)
        if self.blocks is None:
            return matrix
        if self.shape[1] % (GROUP * len(self.blocks)):
            raise ValueError(
                f"tensor {self.entry.name} in {self.entry.path} must have {GROUP} n inputs for each of "
                f"{len(self.blocks)} heads to stay in codes, got {self.shape[1]}"
            )
        fields = {name: getattr(matrix, name) for name in ("values", "scale", "zero", "minimum")}
        return matrix.replace(**{k: None if x is None else _in_order(x, self.blocks) for k, x in fields.items()})


@dataclass(frozen=True)
class Number:
    """A vector of one number, which is a field of the file."""

    value: float
    shape = (1,)
    kind = "F32"
    is_kept = False

    def floats(self, header: Header, index: tuple) -> np.ndarray:
        """Return a part of the vector as floats."""
        return np.asarray([self.value], np.float32)[index]


def _in_order(x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Put the blocks of the last axis of [N, K] into an order."""
    return np.ascontiguousarray(x.reshape(len(x), len(blocks), -1)[:, blocks]).reshape(x.shape)
