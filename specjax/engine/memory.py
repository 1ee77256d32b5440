"""How many pages of a cache the memory of a device has room for."""

import math
from dataclasses import replace
from typing import Any

import jax

from specjax.decoding.drafters import num_fed
from specjax.parallel import OnMesh
from specjax.types import Model, Proposer

SHARE = 0.9  # of the memory that XLA may use; the rest is for gaps that the allocator cannot join
SMALL = 1 / 8  # of the free memory: so much may be unused
COPIES = 6  # arrays of the size of a step's logits that live at a time


def free_bytes() -> int | None:
    """Return how much of the first device's memory is left for pages and calls; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(SHARE * stats["bytes_limit"]) - stats["bytes_in_use"]


def num_pages_that_fit(
    model: Model,
    proposer: Proposer,
    *,
    num_slots: int,
    max_length: int,
    page_size: int,
    chunk_size: int,
    num_samples: int | None = None,
    num_kept: int = 0,
) -> int:
    """Return as many pages as all slots need at their longest, or as fit into the memory that is free now.

    Where there are `num_samples` samples in all, and the pages of all slots would take more than `SMALL` of the free
    memory, these are the pages that so many samples need. Beside the rows of the slots there is room for `num_kept`
    rows, the states after shared beginnings of prompts.

    Raises:
        ValueError: not even one slot at its longest fits.
    """
    pages_per_row = -(-max_length // page_size)
    wanted, free = num_slots * pages_per_row, free_bytes()
    if free is None:
        return wanted
    if isinstance(model.apply, OnMesh):  # each device has its part
        model = replace(model, init_cache=model.apply.init_cache, init_rows=model.apply.init_rows)

    def size(num_pages: int) -> int:
        def init() -> tuple[Any, Any]:
            sizes = num_slots + num_kept, num_pages, page_size
            return model.init_memory(*sizes), proposer.init_memory(*sizes)

        memories = jax.eval_shape(init)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(memories))

    rows = max(num_slots * num_fed(proposer), chunk_size)
    page, one = size(2) - size(1), size(1)
    if num_samples is not None and wanted * page > SMALL * free:
        wanted = min(num_samples, num_slots) * pages_per_row
    fitting = (free - COPIES * 4 * rows * model.vocab_size - (one - page)) // max(page, 1)
    if fitting < min(wanted, pages_per_row):
        raise ValueError(
            f"the free memory of the device holds {max(0, fitting) * page_size} tokens with num_slots = {num_slots}, "
            f"and max_length is {max_length}: lower max_length or num_slots, load the weights in bfloat16, or let more "
            "devices share the model"
        )
    return min(wanted, fitting)
