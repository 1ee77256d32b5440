"""Decide on the host which pages of a cache hold the slots of each row."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.page_pool import PagePool
from specjax.engine.prefix_cache import CachedChunk, ChunkKey, PrefixCache


@dataclass(eq=False)
class Row:
    """The pages of one sequence; `PageTables` makes and changes it."""

    table: np.ndarray  # [P] int32: the page of each page_size slots, num_pages for none; it changes in place
    num_cached_tokens: int = 0  # number of its tokens that were found in the cache, whole chunks
    value: Any = None  # the value stored with the last chunk found
    stop: int = 0  # the first `stop` entries of the table hold pages
    keys: list[ChunkKey] = field(default_factory=list)  # of the chunks that it may share
    chain: list[CachedChunk] = field(default_factory=list)  # the first of these chunks that are known


class PageStats(NamedTuple):
    """Figures of a cache."""

    num_free: int  # pages that hold nothing
    num_used: int  # pages of rows
    num_cached: int  # pages of no row with chunks that new rows may find; they are free for the asking
    num_query_tokens: int  # tokens of all rows inserted so far that could share
    num_hit_tokens: int  # query tokens that were found


class PageTables:
    """Give pages to rows as they grow, and let rows share the pages of a common beginning.

    It touches no device: a caller hands copies of the tables, which change in place, to its calls of the model.
    Pages freed here may be given to another row at once, as a device runs its calls in the order of their dispatch. Not
    safe for several threads.

    Args:
        num_pages: number of pages of the device's pool; in tables it stands for "no page".
        page_size: number of slots of a page.
        pages_per_row: P, the width of a table.
        chunk_size: number of tokens of the chunks that prompts are computed and shared in, a multiple of page_size.
        seed: secret of the hashes; drawn from the operating system if None.
        num_values: the most values of chunks that are kept; None is no limit. No row
            begins after a chunk whose value was dropped.

    Examples:
        >>> tables = PageTables(num_pages=8, page_size=2, pages_per_row=4, chunk_size=4)
        >>> prompt = np.arange(7, dtype=np.int32)
        >>> first = tables.insert(prompt, num_slots=7)
        >>> first.table
        array([0, 1, 2, 3], dtype=int32)
        >>> tables.register(first, 4, "what a drafter needs to go on from slot 4")
        >>> second = tables.insert(prompt, num_slots=6)
        >>> second.table, second.num_cached_tokens
        (array([0, 1, 4, 8], dtype=int32), 4)
        >>> second.value
        'what a drafter needs to go on from slot 4'
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        pages_per_row: int,
        chunk_size: int,
        *,
        seed: bytes | None = None,
        num_values: int | None = None,
    ):
        if page_size < 1 or pages_per_row < 1:
            raise ValueError(f"page_size and pages_per_row must be at least 1, got {page_size} and {pages_per_row}")
        if chunk_size < 1 or chunk_size % page_size:
            raise ValueError(f"chunk_size must be a positive multiple of page_size {page_size}, got {chunk_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self.pages_per_row, self.chunk_size = pages_per_row, chunk_size
        self._pool = PagePool(num_pages)
        self._prefixes = PrefixCache(self._pool, chunk_size, seed, num_values)
        self._rows: dict[Row, None] = {}
        self._num_query_tokens = self._num_hit_tokens = 0

    def no_pages(self, *shape: int) -> np.ndarray:
        """Return tables [*shape, P] int32 without a page."""
        return np.full((*shape, self.pages_per_row), self.num_pages, np.int32)

    def insert(
        self,
        tokens: np.ndarray,
        num_slots: int,
        salt: bytes | None = b"",
        *,
        takes: bool = True,
        table: np.ndarray | None = None,
    ) -> Row | None:
        """Make a row for a sequence, which begins with the pages of the longest known chain of its chunks.

        Args:
            tokens: prompt of a new request, or all tokens so far of one that goes on, [length] int32.
            num_slots: number of slots that the row has pages for, at least; more come from `ensure`.
            salt: whatever else changes the content of the cache, or who may see that a prompt was known: rows share
                where it is equal. None: the row neither takes nor gives shared pages.
            takes: whether the row takes shared pages; if not, it computes all of its chunks, and gives them.
            table: [P] int32 without a page, such as a row of a larger table: the `table` of the row. None makes one.

        Returns:
            The row, whose slots from its `num_cached_tokens` on are to be computed. None where there are too few pages.

        Raises:
            ValueError: tokens are not [length] int32 with length at least 1, or do not fit a table.
        """
        if tokens.ndim != 1 or tokens.dtype != np.int32 or tokens.size == 0:
            raise ValueError(f"tokens must be int32 [length], length >= 1, got {tokens.dtype} {list(tokens.shape)}")
        self._num_pages(max(len(tokens), num_slots))
        row = Row(self.no_pages() if table is None else table)
        self._rows[row] = None
        if salt is not None:
            row.keys = self._prefixes.keys(tokens, salt)
            row.chain = self._prefixes.find(row.keys) if takes else []
        found = [page for chunk in row.chain for page in chunk.pages]
        self._pool.share(found)  # before anything is evicted
        self._append(row, found)
        if not self.ensure(row, num_slots):
            self.free(row)
            return None
        if row.chain:
            row.num_cached_tokens = len(row.chain) * self.chunk_size
            row.value = row.chain[-1].value
        if salt is not None:
            self._num_query_tokens += len(tokens)
            self._num_hit_tokens += row.num_cached_tokens
        return row

    def ensure(self, row: Row, num_slots: int) -> bool:
        """Give a row pages for its first `num_slots` slots, evicting cached chunks where no page is free.

        Returns:
            Whether it has them. If not, there are too few pages, and nothing has changed.

        Raises:
            ValueError: a table has no room for so many slots.
        """
        self._check_live(row)
        num_new = self._num_pages(num_slots) - row.stop
        if num_new <= 0:
            return True
        pages = self._pool.allocate(num_new) if self._prefixes.make_room(num_new) else None
        if pages is None:
            return False
        self._append(row, pages)
        return True

    def take(self, row: Row, num_computed: int) -> bool:
        """Let a row take the chunk after its first `num_computed` slots, where another has computed it by now.

        The row's `value` is then the chunk's, and its own pages for it are free. Only for a row that still
        computes its prompt.

        Returns:
            Whether there is such a chunk.
        """
        self._check_live(row)
        num_known = len(row.chain)
        if num_computed != num_known * self.chunk_size or num_known >= len(row.keys):
            return False
        chunk = self._prefixes.follow(row.keys[num_known], row.chain[-1] if row.chain else None)
        if chunk is None:
            return False
        stop = (num_computed + self.chunk_size) // self.page_size
        entries = row.table[stop - len(chunk.pages) : stop]
        self._pool.share(chunk.pages)
        self._pool.free(entries.tolist())
        entries[:] = chunk.pages
        row.chain.append(chunk)
        row.num_cached_tokens, row.value = row.num_cached_tokens + self.chunk_size, chunk.value
        self._num_hit_tokens += self.chunk_size
        return True

    def key_at(self, row: Row, num_computed: int) -> ChunkKey | None:
        """Return the key of the chunk that has the slot `num_computed`; None where it must stay private."""
        self._check_live(row)
        index = num_computed // self.chunk_size
        return row.keys[index] if index < len(row.keys) else None

    def register(self, row: Row, num_computed: int, value: Any = None) -> None:
        """Let other rows find the chunk that ends at slot `num_computed`, once its computation is dispatched.

        To be called after each chunk of a prompt. Nothing happens where the chunk is not whole, must stay private
        because steps write it, or is known already: where two rows compute the same chunk, the first to register it is
        found, and both go on with their own pages.

        Args:
            row: the row that computed it.
            num_computed: number of the row's first slots that are computed now.
            value: state for a row that goes on after this chunk, such as the features of its last token.
        """
        if not self.can_register(row, num_computed):
            return
        num_chunks = num_computed // self.chunk_size
        stop = num_computed // self.page_size
        start = stop - self.chunk_size // self.page_size
        if stop > row.stop:
            raise ValueError(f"num_computed must be within the row's {row.stop * self.page_size} slots")
        parent = row.chain[-1] if row.chain else None
        chunk = self._prefixes.register(row.keys[num_chunks - 1], parent, row.table[start:stop].tolist(), value)
        if chunk is not None:
            row.chain.append(chunk)

    def can_register(self, row: Row, num_computed: int) -> bool:
        """Return whether the chunk that ends at slot `num_computed` is one that `register` may make known."""
        self._check_live(row)
        num_chunks, rest = divmod(num_computed, self.chunk_size)
        return not rest and num_chunks <= len(row.keys) and num_chunks == len(row.chain) + 1

    def free(self, row: Row) -> None:
        """End a row that is finished, cancelled or preempted, and free its pages.

        Raises:
            ValueError: the row has ended before, or is not of these tables.
        """
        self._check_live(row)
        self._pool.free(row.table[: row.stop][::-1].tolist())  # the end of a chain is the first to be evicted
        row.table[: row.stop] = self._pool.num_pages
        row.stop = 0
        del self._rows[row]

    @property
    def num_available(self) -> int:
        """Number of pages that `ensure` could give a row: free pages, and cached ones."""
        return self._pool.num_free + self._pool.num_cached

    @property
    def free_pages(self) -> list[int]:
        """The pages that hold nothing: no row has them, and none would find anything in them."""
        return self._pool.free_pages

    def stats(self) -> PageStats:
        """Return the numbers of pages in each state, and of tokens looked up and found."""
        num_free, num_cached = self._pool.num_free, self._pool.num_cached
        num_used = self._pool.num_pages - num_free - num_cached
        return PageStats(num_free, num_used, num_cached, self._num_query_tokens, self._num_hit_tokens)

    def check(self) -> None:
        """Assert that tables, counts and chunks agree with each other. For tests; takes time in all pages."""
        self._pool.check()
        self._prefixes.check()
        counts = [0] * self._pool.num_pages
        for row in self._rows:
            held = row.table[: row.stop].tolist()
            assert len(held) == np.sum(row.table != self._pool.num_pages), "a table has other pages than the row's"
            for page in held:
                counts[page] += 1
        assert counts == self._pool._counts, "a count is not the number of rows with the page"

    def _append(self, row: Row, pages: list[int]) -> None:
        row.table[row.stop : row.stop + len(pages)] = pages
        row.stop += len(pages)

    def _num_pages(self, num_slots: int) -> int:
        num_pages = -(-num_slots // self.page_size)
        if num_pages > self.pages_per_row:
            limit = self.pages_per_row * self.page_size
            raise ValueError(f"a row has at most {limit} slots, got {num_slots}")
        return num_pages

    def _check_live(self, row: Row) -> None:
        if row not in self._rows:
            raise ValueError("the row has ended, or belongs to other tables")
