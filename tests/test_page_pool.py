"""Reference counts of pages."""

import pytest

from specjax.engine.page_pool import PagePool


def is_private(pool, page):
    """Return whether a page is in use by one row, and nobody else can find its content."""
    return pool._counts[page] == 1 and page not in pool._contents


def numbers(pool):
    pool.check()
    return pool.num_free, pool.num_pages - pool.num_free - pool.num_cached, pool.num_cached


def test_pages_are_handed_out_in_a_fixed_order():
    pool = PagePool(5)
    assert pool.allocate(2) == [0, 1] and pool.allocate(1) == [2]
    pool.free([1])
    pool.free([0])
    assert pool.allocate(3) == [0, 1, 3]
    assert numbers(pool) == (1, 4, 0)


def test_all_or_nothing():
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert numbers(pool) == (3, 0, 0)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_when_the_last_row_frees_it():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    assert not is_private(pool, page)
    pool.free([page])
    assert is_private(pool, page) and numbers(pool) == (1, 1, 0)
    pool.free([page])
    assert numbers(pool) == (2, 0, 0)


def test_a_kept_page_is_cached_until_it_is_dropped():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.keep([pages[0]], "content")
    assert not is_private(pool, pages[0]) and is_private(pool, pages[1])
    pool.free(pages)
    assert numbers(pool) == (2, 0, 1) and pool.oldest_content() == "content"
    assert pool.allocate(3) is None
    pool.share([pages[0]])
    assert numbers(pool) == (2, 1, 0)
    pool.free([pages[0]])
    pool.drop([pages[0]])
    assert numbers(pool) == (3, 0, 0)


def test_a_page_that_is_dropped_in_use_stays_with_its_row():
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.keep(pages, "content")
    pool.drop(pages)
    assert numbers(pool) == (0, 1, 0) and is_private(pool, 0)
    pool.free(pages)
    assert numbers(pool) == (1, 0, 0)


def test_the_oldest_is_the_least_recently_used():
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page in pages:
        pool.keep([page], page)
    pool.free(pages)
    pool.share([0])
    pool.free([0])
    order = []
    while pool.num_cached:
        order.append(pool.oldest_content())
        pool.drop(order[-1:])
    assert order == [1, 2, 0]


def test_misuse_is_refused():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages[::-1])
    with pytest.raises(ValueError, match="page 1 is not in use; it was freed before or never allocated"):
        pool.free([1])
    with pytest.raises(ValueError, match="page 3 is not in use"):
        pool.free([3])
    with pytest.raises(ValueError, match="page 0 is free; only a page in use or a cached one can be shared"):
        pool.share([0])
    with pytest.raises(ValueError, match="page 0 must be in use and not kept yet"):
        pool.keep([0], "content")
    for page in (-1, 4):
        for method in (pool.free, pool.share, lambda pages: pool.keep(pages, "content")):
            with pytest.raises(ValueError, match=rf"page must be in \[0, 4\), got {page}"):
                method([page])
    pool.allocate(1)
    pool.keep([0], "content")
    with pytest.raises(ValueError, match="page 0 must be in use and not kept yet"):
        pool.keep([0], "other content")
    pool.free([0])
    with pytest.raises(ValueError, match="page 0 is not in use"):
        pool.free([0])
    with pytest.raises(ValueError, match="num_pages must be at least 0, got -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        PagePool(0)
    assert numbers(pool) == (3, 0, 1)


@pytest.mark.parametrize("page", [0, 1, 2])
def test_check_finds_a_page_without_one_state(page):
    """Pages 0, 1 and 2 are in use, cached and free."""
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.keep([1], "content")
    pool.free([1])
    assert pages == [0, 1]
    pool.check()
    pool._counts[page] = 1 - pool._counts[page]
    with pytest.raises(AssertionError, match="a page has not one state"):
        pool.check()
