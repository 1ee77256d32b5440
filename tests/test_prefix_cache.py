"""Chunks of prompts: how they are found, and in which order they are evicted."""

import numpy as np
import pytest

from specjax.engine import prefix_cache
from specjax.engine.page_pool import PagePool
from specjax.engine.prefix_cache import PrefixCache


def is_private(pool, page):
    """Return whether a page is in use by one row, and nobody else can find its content."""
    return pool._counts[page] == 1 and page not in pool._contents


def tokens(text):
    return np.array([int(digit) for digit in text], np.int32)


class Chunks:
    """A cache of chunks of two tokens, each in a separate page."""

    def __init__(self, num_pages=8):
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, chunk_size=2, seed=b"seed")

    def add(self, text, salt=b""):
        """Register the last chunk of a sequence that is nothing but shared chunks; gives its page."""
        *before, key = self.cache.keys(tokens(text + "00"), salt)
        chain = self.cache.find(before)
        assert len(chain) == len(before)
        (page,) = self.pool.allocate(1)
        self.cache.register(key, chain[-1] if chain else None, [page], text)
        return page

    def find(self, text, salt=b""):
        """The values of the chunks that are found for a sequence."""
        self.cache.check()
        self.pool.check()
        return [chunk.value for chunk in self.cache.find(self.cache.keys(tokens(text), salt))]


@pytest.mark.parametrize("length, num_chunks", [(1, 0), (2, 0), (3, 0), (5, 0), (6, 1), (9, 1), (10, 2), (11, 2)])
def test_chunks_end_before_the_last_two_tokens(length, num_chunks):
    cache = PrefixCache(PagePool(1), chunk_size=4)
    assert len(cache.keys(np.arange(length, dtype=np.int32), b"")) == num_chunks


def test_the_longest_chain_is_found():
    chunks = Chunks()
    for text in ("12", "1234", "1256", "34"):
        chunks.add(text)
    assert chunks.find("123456") == ["12", "1234"]
    assert chunks.find("1256123") == ["12", "1256"]
    assert chunks.find("3412999") == ["34"]
    assert chunks.find("1299999") == ["12"]
    assert chunks.find("5612999") == []
    assert chunks.find("123") == []


def test_a_salt_and_a_seed_set_prompts_apart():
    chunks = Chunks()
    chunks.add("12", salt=b"a")
    assert chunks.find("1234", salt=b"a") == ["12"]
    assert chunks.find("1234") == chunks.find("1234", salt=b"b") == []
    first, second = (PrefixCache(PagePool(1), 2, seed).keys(tokens("1234"), b"") for seed in (b"1", b"2"))
    assert first[0].digest != second[0].digest and first[0].content == second[0].content
    first, second = (PrefixCache(PagePool(1), 2).keys(tokens("1234"), b"") for _ in range(2))
    assert first[0].digest != second[0].digest
    chained = [PrefixCache(PagePool(1), 2, b"").keys(tokens(text), b"")[1] for text in ("123400", "563400")]
    assert chained[0].digest != chained[1].digest and chained[0].content == chained[1].content


def test_equal_hashes_do_no_harm(monkeypatch):
    """The first prompt of a hash keeps it; others are neither found nor registered under it."""
    monkeypatch.setattr(prefix_cache, "_hash", lambda data: b"the same")
    chunks = Chunks()
    chunks.add("12", salt=b"a")
    assert chunks.find("1234", salt=b"a") == ["12"]
    assert chunks.find("5634", salt=b"a") == chunks.find("1234") == chunks.find("1234", salt=b"b") == []
    chunks.add("56")
    assert chunks.find("5600") == []
    assert chunks.find("1234", salt=b"a") == ["12"]


def test_equal_hashes_of_different_parents_do_no_harm(monkeypatch):
    """Both prompts go on with the same tokens."""
    digests = {b"12": b"12", b"34": b"34", b"56": b"56"}

    def last_chunk(data):
        return digests["".join(map(str, np.frombuffer(data[-8:], np.int32))).encode()]

    monkeypatch.setattr(prefix_cache, "_hash", last_chunk)
    chunks = Chunks()
    for text in ("12", "34", "1256"):
        chunks.add(text)
    assert chunks.find("125600") == ["12", "1256"]
    assert chunks.find("345600") == ["34"]
    chunks.add("3456")
    assert chunks.find("345600") == ["34"]


def test_the_second_registration_keeps_the_first():
    chunks = Chunks()
    first = chunks.add("12")
    (key,) = chunks.cache.keys(tokens("1200"), b"")
    second = chunks.pool.allocate(1)
    known = chunks.cache.register(key, None, second, "second")
    assert known.value == "12" and known.pages == [first]
    assert chunks.find("1200") == ["12"]
    assert is_private(chunks.pool, second[0]) and not is_private(chunks.pool, first)


def test_the_least_recently_used_leaf_is_evicted_first():
    chunks = Chunks(5)
    a, ab, ac, b, c = pages = [chunks.add(text) for text in ("11", "1122", "1133", "22", "33")]
    assert pages == [0, 1, 2, 3, 4]
    assert not chunks.cache.make_room(1)
    chunks.pool.free([b, ab, c, ac, a])
    chunks.pool.share([b])
    chunks.pool.free([b])
    order = []
    for num_pages in range(1, 6):
        before = set(chunks.cache._chunks.values())
        assert chunks.cache.make_room(num_pages) and chunks.pool.num_free == num_pages
        order += [chunk.value for chunk in before - set(chunks.cache._chunks.values())]
        assert chunks.find("000") == []  # which checks that there are no holes
    assert order == ["1122", "33", "1133", "11", "22"]
    assert not chunks.cache.make_room(6)


def test_a_parent_goes_after_its_children():
    """Even where a parent was freed before its children, as windows and rows that compute the same chunk do."""
    chunks = Chunks(4)
    a, ab, abc, x = (chunks.add(text) for text in ("11", "1122", "112233", "44"))
    chunks.pool.free([a, x, ab, abc])
    assert chunks.cache.make_room(1)
    assert chunks.find("11223300") == ["11", "1122"] and chunks.find("4400") == ["44"]
    assert chunks.cache.make_room(3)
    assert chunks.find("11223300") == [] and chunks.find("4400") == ["44"]


def test_the_first_of_several_children_goes_first():
    chunks = Chunks(3)
    chunks.pool.free([chunks.add("11"), chunks.add("1133"), chunks.add("1122")])
    assert chunks.cache.make_room(1)
    assert chunks.find("113300") == ["11"] and chunks.find("112200") == ["11", "1122"]


def test_a_child_in_use_is_no_longer_found_when_its_parent_goes():
    chunks = Chunks(2)
    parent, child = chunks.add("11"), chunks.add("1122")
    chunks.pool.free([parent])
    assert chunks.find("112200") == ["11", "1122"]
    assert chunks.cache.make_room(1)
    assert chunks.find("112200") == []
    assert is_private(chunks.pool, child)


def test_a_chunk_whose_parent_is_gone_is_not_registered():
    chunks = Chunks(3)
    chunks.pool.free([chunks.add("11")])
    first, second = chunks.cache.keys(tokens("112200"), b"")
    (parent,) = chunks.cache.find([first])
    assert chunks.cache.make_room(3)
    pages = chunks.pool.allocate(1)
    assert chunks.cache.register(second, parent, pages, "1122") is None
    chunks.add("11")
    assert chunks.cache.register(second, parent, pages, "1122") is None
    assert chunks.find("112200") == ["11"]
