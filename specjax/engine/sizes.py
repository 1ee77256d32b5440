"""The default sizes of batches, chunks and pages, by use and platform."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from specjax.validation import is_integer

Use = Literal["call", "call with many samples", "server", "batch"]


@dataclass(frozen=True)
class Sizes:
    """Sizes that a caller may leave out."""

    page: int  # tokens (cache slots) of a page
    chunk: int  # tokens of a prompt that are fed in a call
    short_chunks: tuple[tuple[int, int], ...]  # rows, and tokens of a row, of the calls that feed short prompts
    slots: int  # samples that are decoded at a time
    step_sizes: tuple[int, ...]  # slots that a step computes if few are active


# A server feeds a chunk between two steps of running requests, and its prompts are often long: large chunks pay. On
# CPUs a vacant slot costs as much as another, so there are many only in a long call. In a batch nearly all steps are
# full.
SIZES: dict[Use, dict[Literal["cpu", "gpu"], Sizes]] = {
    "call": {
        "gpu": Sizes(page=64, chunk=256, short_chunks=((4, 64),), slots=64, step_sizes=(1,)),
        "cpu": Sizes(page=32, chunk=32, short_chunks=((1, 16),), slots=8, step_sizes=(1,)),
    },
    "call with many samples": {
        "gpu": Sizes(page=64, chunk=256, short_chunks=((4, 64),), slots=64, step_sizes=(1,)),
        "cpu": Sizes(page=32, chunk=32, short_chunks=((1, 16),), slots=32, step_sizes=(1,)),
    },
    "server": {
        "gpu": Sizes(page=64, chunk=512, short_chunks=((4, 64), (1, 256)), slots=16, step_sizes=(1, 8, 32)),
        "cpu": Sizes(page=64, chunk=64, short_chunks=((1, 32),), slots=8, step_sizes=(1,)),
    },
    "batch": {
        "gpu": Sizes(page=64, chunk=512, short_chunks=((4, 64), (1, 256)), slots=16, step_sizes=()),
        "cpu": Sizes(page=64, chunk=64, short_chunks=((1, 32),), slots=16, step_sizes=()),
    },
}
MANY_SAMPLES = 64  # of a call


def default_sizes(use: Use) -> Sizes:
    """Return the sizes for a use on the platform of this process; accelerators have the sizes of GPUs."""
    return SIZES[use]["cpu" if jax.default_backend() == "cpu" else "gpu"]


def chunk_shapes(
    shapes: Sequence[tuple[int, int]] | None, chunk_size: int, num_slots: int
) -> Sequence[tuple[int, int]]:
    """Return the numbers of rows and tokens of each call that feeds short chunks."""
    if shapes is None:
        defaults = default_sizes("server").short_chunks
        return [(min(rows, chunk_size // size, num_slots), size) for rows, size in defaults if size < chunk_size]

    def is_pair(shape: Any) -> bool:
        return isinstance(shape, tuple) and len(shape) == 2 and all(is_integer(n) and n >= 1 for n in shape)

    if not isinstance(shapes, list | tuple) or not all(
        is_pair(shape) and shape[1] < chunk_size and math.prod(shape) <= chunk_size for shape in shapes
    ):
        raise ValueError(
            "short_chunks must be pairs of rows >= 1 and tokens in [1, chunk_size - 1], with products of at most "
            f"chunk_size = {chunk_size}, got {shapes!r}"
        )
    return shapes
