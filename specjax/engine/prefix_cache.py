"""Find the pages of prompts whose beginning another request has computed."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.page_pool import PagePool


class ChunkKey(NamedTuple):
    """Key of a chunk of a prompt."""

    digest: bytes  # of this chunk and all before it
    content: bytes  # tokens of this chunk as int32; the first chunk has the salt before them


@dataclass(eq=False)
class CachedChunk:
    """A computed chunk that rows may share. Chunks form trees: each continues its parent."""

    key: ChunkKey
    parent: "CachedChunk | None"  # None for the first chunk of a prompt
    pages: list[int]
    value: Any  # the value that was stored with it; None where it was dropped
    children: dict["CachedChunk", None] = field(default_factory=dict)  # in the order of their registration


class PrefixCache:
    """Keep computed chunks of prompts until their pages are needed.

    A chunk is found by a chain of hashes, SHA-256 of the digest of the chunk before and the chunk's own tokens, which
    begins with a secret seed. Its tokens and its parent are compared as well, so equal hashes of different prompts do
    no harm.

    Args:
        pool: the pages.
        chunk_size: number of tokens of a chunk.
        seed: the secret that hashes begin with; drawn from the operating system if None.
        num_values: the most values that are kept. A chunk whose value was dropped is found as the middle of a chain,
            and not as its end. None is no limit.
    """

    def __init__(self, pool: PagePool, chunk_size: int, seed: bytes | None = None, num_values: int | None = None):
        self._pool = pool
        self._chunk_size = chunk_size
        self._num_values = num_values
        self._values: OrderedDict[CachedChunk, None] = (
            OrderedDict()
        )  # chunks that have theirs, first to be dropped first
        self._seed = os.urandom(32) if seed is None else seed
        self._chunks: dict[bytes, CachedChunk] = {}

    def keys(self, tokens: np.ndarray, salt: bytes) -> list[ChunkKey]:
        """Return the keys of the chunks that a sequence may share, first to last.

        The first step of a sequence feeds its last token again and drafters feed its last two, so these are the whole
        chunks that end at or before slot length - 2.

        Args:
            tokens: the sequence, [length] int32.
            salt: whatever else changes the content of the cache.
        """
        num_chunks = max(len(tokens) - 2, 0) // self._chunk_size
        keys, digest = [], self._seed
        for chunk in tokens[: num_chunks * self._chunk_size].reshape(num_chunks, self._chunk_size):
            content = chunk.tobytes() if keys else salt + chunk.tobytes()
            digest = _hash(digest + content)
            keys.append(ChunkKey(digest, content))
        return keys

    def find(self, keys: Sequence[ChunkKey]) -> list[CachedChunk]:
        """Return the longest known chain of chunks that a sequence begins with and whose last chunk has its value."""
        chain = []
        for key in keys:
            chunk = self._known(key, chain[-1] if chain else None)
            if chunk is None:
                break
            chain.append(chunk)
        while chain and not self._has_value(chain[-1]):
            chain.pop()
        return chain

    def follow(self, key: ChunkKey, parent: CachedChunk | None) -> CachedChunk | None:
        """Return the known chunk of a key that continues `parent`, None for the first chunk, if it has its value."""
        chunk = self._known(key, parent)
        return chunk if chunk is not None and self._has_value(chunk) else None

    def register(
        self, key: ChunkKey, parent: CachedChunk | None, pages: Sequence[int], value: Any
    ) -> CachedChunk | None:
        """Make a computed chunk known, unless it already is.

        Args:
            key: its key.
            parent: the chunk before it, None for the first.
            pages: the pages that hold it, in use.
            value: anything to keep with it.

        Returns:
            The chunk that is found by this key from now on, which may have other pages; None where there is none, as
            the parent was evicted or another prompt has the same hash.
        """
        if parent is not None and self._chunks.get(parent.key.digest) is not parent:
            return None
        known = self._chunks.get(key.digest)
        if known is not None:
            if not _is_same(known, key, parent):
                return None
            if not self._has_value(known):
                self._keep_value(known, value)
            return known
        chunk = CachedChunk(key, parent, list(pages), None)
        self._pool.keep(chunk.pages, chunk)
        self._chunks[key.digest] = chunk
        if parent is not None:
            parent.children[chunk] = None
        self._keep_value(chunk, value)
        return chunk

    def make_room(self, num_pages: int) -> bool:
        """Evict the least recently used chunks until so many pages are free.

        A chain never has a hole: later chunks are evicted before earlier ones. That includes chunks that rows still
        use, where these have a copy of their own of the chunk or do not need it any more. Such rows keep their pages.

        Returns:
            Whether so many pages are free. If not, nothing has changed.
        """
        if num_pages > self._pool.num_free + self._pool.num_cached:
            return False
        while self._pool.num_free < num_pages:
            chunk = self._pool.oldest_content()
            while chunk.children:
                chunk = next(iter(chunk.children))
            self._evict(chunk)
        return True

    def check(self) -> None:
        """Assert that every chunk can be found and that no other page is kept. For tests; takes time in all chunks."""
        for digest, chunk in self._chunks.items():
            keys, ancestor = [], chunk
            while ancestor is not None:
                keys.insert(0, ancestor.key)
                ancestor = ancestor.parent
            assert digest == chunk.key.digest and self._known(keys[-1], chunk.parent) is chunk, (
                "a chunk cannot be found"
            )
            is_kept = self._num_values is None or chunk in self._values
            assert is_kept or chunk.value is None, "a value that was dropped is there"
            assert chunk.parent is None or chunk in chunk.parent.children, "a parent does not know its child"
            assert all(child.parent is chunk for child in chunk.children), "a child does not know its parent"
        held = {page: chunk for chunk in self._chunks.values() for page in chunk.pages}
        assert held == self._pool._contents, "other pages are kept than those of chunks"

    def _known(self, key: ChunkKey, parent: CachedChunk | None) -> CachedChunk | None:
        chunk = self._chunks.get(key.digest)
        return chunk if chunk is not None and _is_same(chunk, key, parent) else None

    def _has_value(self, chunk: CachedChunk) -> bool:
        """Return whether a chunk has its value, which then counts as used."""
        if self._num_values is None:
            return True
        if chunk not in self._values:
            return False
        self._values.move_to_end(chunk)
        return True

    def _keep_value(self, chunk: CachedChunk, value: Any) -> None:
        """Keep the value of a chunk, and drop others where there are too many.

        First come those in the middle of a chain, where no other prompt has turned off, and then the least recently
        used ones.
        """
        chunk.value = value
        if self._num_values is None:
            return
        self._values[chunk] = None
        parent = chunk.parent
        if parent in self._values and len(parent.children) == 1:
            self._values.move_to_end(parent, last=False)
        while len(self._values) > self._num_values:
            self._values.popitem(last=False)[0].value = None

    def _evict(self, chunk: CachedChunk) -> None:
        self._values.pop(chunk, None)
        del self._chunks[chunk.key.digest]
        if chunk.parent is not None:
            del chunk.parent.children[chunk]
        self._pool.drop(reversed(chunk.pages))


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_same(chunk: CachedChunk, key: ChunkKey, parent: CachedChunk | None) -> bool:
    """Say whether a chunk found by its digest is the one that was looked for."""
    return chunk.parent is parent and chunk.key.content == key.content
