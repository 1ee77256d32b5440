"""Caches in pages: the slots of each row, found by a page table, and the checks of such a table.

A cache is a pool of pages. Slot s of row b is `leaf[table[b, s // page_size], s % page_size]` in every leaf of it. A
number outside the pool stands for no page. A dense cache [B, S, ...] is a pool too, where row b owns page b alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import NO_PAGE, Array, Memory, Model, Proposer, PyTree
from specjax.validation import check_array, is_integer, is_traced

__all__ = ["Pages", "copy_pages", "read_slots", "write_slots"]


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["num_pages", "page_size"])
@dataclass(frozen=True)
class Pages:
    """A page table, and the sizes of the pools that it points into: one of the target, and one of each drafter."""

    table: Array  # [B, P] int32, the pages of each row in order; num_pages stands for no page
    num_pages: int
    page_size: int

    @property
    def pool(self) -> tuple[int, int]:
        """The arguments of `Model.init_cache` for a pool of this size."""
        return self.num_pages, self.page_size


def write_slots(leaf: Array, slots: Array, values: Array, table: Array | None = None) -> Array:
    """Write to slots of each row. Values past the last slot, or without a page, are dropped.

    Args:
        leaf: [num_pages, page_size, ...]; a dense one [B, S, ...] without a table.
        slots: [B, T] int32, never negative.
        values: [B, T, ...], which get the dtype of the leaf.
        table: [B, P] int32.

    Returns:
        The leaf.

    Example:
        >>> pool, table = jnp.zeros((3, 2)), jnp.array([[2, 0]])
        >>> write_slots(pool, jnp.array([[1, 2]]), jnp.array([[5, 6]]), table)
        Array([[6., 0.],
               [0., 0.],
               [0., 5.]], dtype=float32)
    """
    if slots.size == 1 and jax.default_backend() == "cpu":
        # XLA copies the whole leaf four times to write one slot on CPUs. A second write, which is dropped, prevents it.
        slots, values = (jnp.concatenate([x, x], axis=1) for x in (slots, values))
        page, slot = locate(leaf, slots, table)
        return leaf.at[page, slot.at[:, 1].set(leaf.shape[1])].set(values.astype(leaf.dtype), mode="drop")
    return leaf.at[locate(leaf, slots, table)].set(values.astype(leaf.dtype), mode="drop")


def locate(leaf: Array, slots: Array, table: Array | None = None) -> tuple[Array, Array]:
    """Return where slots [B, T] of each row are: two indices into the leaf, out of range where there is no page."""
    num_pages, size = leaf.shape[:2]
    if table is None:
        return jnp.arange(slots.shape[0])[:, None], slots
    table = _in_range(table, num_pages)
    return jnp.take_along_axis(table, slots // size, axis=1, mode="fill", fill_value=NO_PAGE), slots % size


def read_slots(leaf: Array, table: Array | None = None) -> Array:
    """Return the slots of each row in order [B, S, ...], and zeros where a row has no page.

    Args:
        leaf: [num_pages, page_size, ...]; a dense one [B, S, ...] without a table.
        table: [B, P] int32; S is then P * page_size.

    Example:
        >>> read_slots(jnp.array([[6, 0], [0, 0], [0, 5]]), jnp.array([[2, 0], [1, 3]]))
        Array([[0, 5, 6, 0],
               [0, 0, 0, 0]], dtype=int32)
    """
    if table is None:
        return leaf
    num_pages, size = leaf.shape[:2]
    rows = leaf.at[_in_range(table, num_pages)].get(mode="fill", fill_value=0)
    return rows.reshape(table.shape[0], table.shape[1] * size, *leaf.shape[2:])


def _in_range(table: Array, num_pages: int) -> Array:
    """Return a table as int32 with NO_PAGE for pages outside the pool: a negative index would count from the end."""
    table = jnp.asarray(table, jnp.int32)  # in a smaller dtype num_pages may have no place, and would wrap
    return jnp.where(in_pool(table, num_pages), table, NO_PAGE)


def in_pool(table: Array, num_pages: int) -> Array:
    """Return which entries of a table are pages of the pool."""
    return (table >= 0) & (table < num_pages)


def copy_pages(cache: PyTree, source: Array, target: Array) -> PyTree:
    """Copy pages of a pool onto other pages.

    Args:
        cache: a pytree whose leaves are [num_pages, page_size, ...].
        source: int32 of any shape, the pages to copy.
        target: int32 of the same shape, where each goes; no page may stand here twice.

    Returns:
        The cache. Where source or target is not in the pool, nothing is copied.
    """
    source, target = (jnp.asarray(pages, jnp.int32) for pages in (source, target))

    def copy(leaf: Array) -> Array:
        num_pages = leaf.shape[0]
        is_copied = in_pool(source, num_pages) & in_pool(target, num_pages)
        return leaf.at[jnp.where(is_copied, target, NO_PAGE)].set(leaf[jnp.where(is_copied, source, 0)], mode="drop")

    return jax.tree.map(copy, cache)


def check_pages(model: Model, proposer: Proposer, pages: Pages, batch_size: int, max_length: int) -> None:
    """Raise ValueError unless target and proposer take pages, and the table fits B rows of max_length tokens.

    Under jit the table has no values, so that only its shape is checked.
    """
    if not isinstance(pages, Pages):
        raise ValueError(f"pages must be None or Pages(table, num_pages, page_size), got {type(pages).__name__}")
    for name, taker in (("model", model), ("proposer", proposer)):
        if not getattr(taker, "takes_pages", False):
            other = "" if taker is model else ", or that has no init_memory"
            raise ValueError(f"pages must be None for a {name} whose takes_pages is False{other}, got Pages")
    for name in ("num_pages", "page_size"):
        number = getattr(pages, name)
        if not (is_integer(number) and number >= 1):
            raise ValueError(f"pages.{name} must be an integer >= 1, got {number!r}")
    check_array("pages.table", pages.table, "[B, P]", (batch_size, None), jnp.integer)
    least = -(-max_length // pages.page_size)
    if pages.table.shape[1] < least:
        raise ValueError(
            f"pages.table must have at least {least} pages a row, as max_length is {max_length} and page_size "
            f"{pages.page_size}, got {pages.table.shape[1]}"
        )
    if is_traced(pages.table):
        return
    table = np.asarray(pages.table)
    if not ((table >= 0) & (table <= pages.num_pages)).all():
        raise ValueError(
            f"pages.table must be in [0, num_pages = {pages.num_pages}], got {table.min()} to {table.max()}"
        )
    for b, row in enumerate(table):
        own, counts = np.unique(row[row < pages.num_pages], return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"pages.table must have a page once in a row, got {own[counts > 1][0]} twice in row {b}")


def check_pages_of_prompts(pages: Pages, prompts: Array, lengths: Array, rows: Array | None) -> None:
    """Raise ValueError unless each prompt has its pages, and rows share only pages that no step will write.

    Steps feed the last token of a prompt again, and a draft model the last two. So rows may share the pages that lie
    before these, if they hold the same prompt tokens. Under jit nothing has values, and nothing is checked.
    """
    if is_traced(pages.table, prompts, lengths, rows):
        return
    table, size = np.asarray(pages.table), pages.page_size
    index = np.arange(len(prompts)) if rows is None else np.asarray(rows)
    tokens, ends = np.asarray(prompts)[index], np.asarray(lengths)[index]
    is_missing = (table == pages.num_pages) & (np.arange(table.shape[1]) * size < ends[:, None])
    if is_missing.any():
        b, p = np.argwhere(is_missing)[0]
        raise ValueError(f"pages.table must have a page for every token of a prompt, got none at [{b}, {p}]")
    owned, counts = np.unique(table[table < pages.num_pages], return_counts=True)
    for page in owned[counts > 1]:
        owners, places = np.nonzero(table == page)
        end = (places[0] + 1) * size
        beginnings = tokens[owners, : min(end, tokens.shape[1])]
        if (places != places[0]).any() or (end > ends[owners] - 2).any() or (beginnings != beginnings[0]).any():
            raise ValueError(
                "pages.table must give two rows the same page only where they have the same prompt up to its end, and "
                f"this end is before the last two tokens of both, got page {page} in rows {owners.tolist()}"
            )


def one_page_a_row(batch_size: int) -> Array:
    """Return the table of a dense cache, [B, 1] int32: row b owns page b."""
    return jnp.arange(batch_size, dtype=jnp.int32)[:, None]


def first_rows(rows: Array, num_prompts: int) -> Array:
    """Return the first row of each prompt, [N] int32; B, the number of rows, for a prompt that no row has.

    Args:
        rows: [B] int32, the index of each row's prompt.
        num_prompts: N.
    """
    batch_size = rows.shape[0]
    return jnp.full(num_prompts, batch_size, jnp.int32).at[rows].min(jnp.arange(batch_size, dtype=jnp.int32))


def copy_to_rows(memory: Memory, table: Array, source: Array, num_pages: int) -> Memory:
    """Copy to each row the state of another row: the pages that the two do not share, and the leaves of the row.

    Args:
        memory: the memory.
        table: [B, P] int32, the pages of the rows.
        source: [B] int32, the row that each row is a copy of, which may be itself.
        num_pages: how many pages of a row are copied.
    """
    target = table[:, :num_pages]
    pages = target[source]
    pools = copy_pages(memory.pools, pages, jnp.where(pages == target, NO_PAGE, target))
    return Memory(pools, memory.take(source).rows)
