"""The default sizes of batches, chunks and pages, by use and platform."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax

from specjax.validation import is_integer

Use = Literal["call", "call with many samples", "server", "batch"]


@dataclass(frozen=True)
class Sizes:
    """Sizes that a caller may leave out."""

    page: int  # tokens (cache slots) of a page
    chunk: int  # tokens of a prompt that are fed in a call
    prompts: tuple[int, ...]  # tokens of the calls that feed prompts
    tile: int | None  # tokens of a tile of such a call; None: a call feeds one prompt
    slots: int  # samples that are decoded at a time
    step_sizes: tuple[int, ...]  # slots that a step computes if few are active


# A server feeds a chunk between two steps of running requests, and its prompts are often long: large chunks pay. On
# CPUs a vacant slot costs as much as another, so there are many only in a long call. In a batch nearly all steps are
# full. A tile has the tokens that the kernel of prompts attends from at a time. On CPUs a call costs as much as its
# tokens, so prompts gain nothing from sharing one, and each tile reads the cache anew.
SIZES: dict[Use, dict[Literal["cpu", "gpu"], Sizes]] = {
    "call": {
        "gpu": Sizes(page=64, chunk=256, prompts=(256,), tile=64, slots=64, step_sizes=(1,)),
        "cpu": Sizes(page=32, chunk=32, prompts=(16, 32), tile=None, slots=8, step_sizes=(1,)),
    },
    "call with many samples": {
        "gpu": Sizes(page=64, chunk=256, prompts=(256,), tile=64, slots=64, step_sizes=(1,)),
        "cpu": Sizes(page=32, chunk=32, prompts=(16, 32), tile=None, slots=32, step_sizes=(1,)),
    },
    "server": {
        "gpu": Sizes(page=64, chunk=512, prompts=(128, 256, 512, 2048), tile=64, slots=16, step_sizes=(1, 8, 32, 128)),
        "cpu": Sizes(page=64, chunk=64, prompts=(32, 64), tile=None, slots=8, step_sizes=(1,)),
    },
    "batch": {
        "gpu": Sizes(page=64, chunk=512, prompts=(256, 512, 2048), tile=64, slots=16, step_sizes=()),
        "cpu": Sizes(page=64, chunk=64, prompts=(32, 64), tile=None, slots=16, step_sizes=()),
    },
}
MANY_SAMPLES = 64  # of a call


def default_sizes(use: Use) -> Sizes:
    """Return the sizes for a use on the platform of this process; accelerators have the sizes of GPUs."""
    return SIZES[use]["cpu" if jax.default_backend() == "cpu" else "gpu"]


def checked_prompt_sizes(
    sizes: Sequence[int] | None, chunk_size: int, num_slots: int
) -> tuple[tuple[int, ...], int | None]:
    """Return the numbers of tokens of calls that feed prompts, `chunk_size` among them, and the size of a tile or None.

    The defaults are those that `num_slots` chunks can fill.

    Raises:
        ValueError: the sizes are no positive integers.
    """
    defaults = default_sizes("server")
    if sizes is None:
        sizes = [size for size in defaults.prompts if size <= chunk_size * num_slots]
    if not isinstance(sizes, Sequence) or not all(is_integer(size) and size >= 1 for size in sizes):
        raise ValueError(f"prompt_sizes must be integers >= 1, numbers of tokens, got {sizes!r}")
    sizes = tuple(sorted({*map(int, sizes), chunk_size}))
    return sizes, None if defaults.tile is None else math.gcd(defaults.tile, *sizes)


def checked_step_sizes(sizes: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return the numbers of slots below `num_slots` that a step may compute, the smallest first.

    Raises:
        ValueError: the sizes are no such numbers.
    """
    if not isinstance(sizes, Sequence) or not all(is_integer(size) and 1 <= size < num_slots for size in sizes):
        raise ValueError(f"step_sizes must be integers in [1, num_slots - 1 = {num_slots - 1}], got {sizes!r}")
    return tuple(sorted(set(map(int, sizes))))


@cache
def cheapest(num_tokens: int, sizes: tuple[int, ...], overhead: int) -> tuple[int, int]:
    """Return the cost of the calls that feed so many tokens at the least cost, and the size of the first and largest.

    Args:
        num_tokens: the tokens, in whole tiles.
        sizes: the tokens that a call may have, in ascending order.
        overhead: how many tokens one more call costs as much as.
    """
    if num_tokens >= sizes[-1]:
        return 0, sizes[-1]
    costs = []
    for size in reversed(sizes):
        rest = num_tokens - size
        costs.append((size + overhead + (cheapest(rest, sizes, overhead)[0] if rest > 0 else 0), size))
    return min(costs, key=lambda cost: cost[0])
