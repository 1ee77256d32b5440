"""Count how many rows use each page of a cache, and hand out the pages that none does."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any


class PagePool:
    """Hold the pages 0 to num_pages - 1 with a reference count each.

    A page is in one of three states. It is *in use* while its count is at least 1. With count 0 it is *cached* if
    `keep` has noted its content, and otherwise *free*. Every method takes constant time per page, and the same calls
    always give the same pages.

    Args:
        num_pages: number of pages of the device's pool.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages))[::-1]  # the last one is taken next
        self._contents: dict[int, Any] = {}  # content of each kept page
        self._cached: OrderedDict[int, None] = OrderedDict()  # kept pages with count 0, least recently used first

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        """The free pages."""
        return list(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached pages."""
        return len(self._cached)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take free pages, each with count 1.

        Returns:
            The pages, or None where fewer are free; then nothing has changed.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add 1 to the count of pages in use or cached.

        Raises:
            ValueError: a page is free or not of this pool.
        """
        for page in pages:
            if self._count(page) == 0:
                if page not in self._cached:
                    raise ValueError(f"page {page} is free; only a page in use or a cached one can be shared")
                del self._cached[page]
            self._counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Subtract 1 from the count of pages in use; at 0 a page is cached if it is kept, and else free.

        Raises:
            ValueError: a page is not in use or not of this pool.
        """
        for page in pages:
            if self._count(page) == 0:
                raise ValueError(f"page {page} is not in use; it was freed before or never allocated")
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._contents:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, pages: Iterable[int], content: Any) -> None:
        """Note the content of pages in use, so that they become cached where they would become free.

        Raises:
            ValueError: a page is not in use, holds something else already, or is not of this pool.
        """
        for page in pages:
            if self._count(page) == 0 or page in self._contents:
                raise ValueError(f"page {page} must be in use and not kept yet")
            self._contents[page] = content

    def drop(self, pages: Iterable[int]) -> None:
        """Forget the content of kept pages: cached ones are free now, those in use stay with their rows."""
        for page in pages:
            del self._contents[page]
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def oldest_content(self) -> Any:
        """Return the content of the least recently used cached page, where one is cached."""
        return self._contents[next(iter(self._cached))]

    def check(self) -> None:
        """Assert that every page is exactly one of free, in use and cached. For tests; takes time in all pages."""
        used = [page for page in range(self.num_pages) if self._counts[page] > 0]
        assert sorted([*self._free, *self._cached, *used]) == list(range(self.num_pages)), "a page has not one state"
        assert min(self._counts) >= 0, "a count is negative"
        assert set(self._cached) <= set(self._contents), "a cached page holds nothing"
        assert not set(self._free) & set(self._contents), "a free page is kept"

    def _count(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page must be in [0, {self.num_pages}), got {page}")
        return self._counts[page]
