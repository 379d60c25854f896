"""Pages of the KV cache: who holds them, and which full ones may be read by others. Pure Python, no tensors.

A page is *held* while sequences refer to it and *free* otherwise. A full page whose tokens are known is also *cached*:
it stays findable, held or free, until a new owner takes it. Free pages are taken in the order: not cached, then least
recently released.

A cached page is found under the key hash(parent's key, its token ids), a chain that begins at the manifest digest. The
hash is only an index: a hit also compares the tokens and the page before it, and a page is cached only behind a cached
one, so a hit means equal tokens from the first to the last. A sequence releases its last page first; therefore a page is
never taken before those that continue it, and "the page before it" stays what it was.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TypeAlias

from services.rollout.sequence import Sequence

Content: TypeAlias = "tuple[int | None, array[int]]"
"""The page before it, and its token ids."""


class PagePool:
    """Allots `num_pages` pages of `page_size` tokens.

    >>> pool = PagePool(num_pages=4, page_size=2)
    >>> seq = Sequence(arrival=0, token_ids=array("i", [5, 6, 7]))
    >>> pool.allocate(seq, pool.lookup(seq)), seq.pages
    (True, [0, 1])
    """

    def __init__(self, *, num_pages: int, page_size: int, shares_prefixes: bool = True) -> None:
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        if num_pages < 1:
            raise ValueError(f"the KV cache must hold at least one page of {page_size} tokens, got {num_pages} pages")
        self.num_pages, self.page_size, self.shares_prefixes = num_pages, page_size, shares_prefixes
        self._root = b""
        self._references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        """Free and not cached, the next one last."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Free and cached, least recently released first."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._content_of: dict[int, Content] = {}
        self._claims: dict[bytes, Sequence] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._page_of)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reset(self, manifest_digest: str, *, keeps_kv: bool = False) -> None:
        """Begins the chain of another version: every cached page is forgotten. No sequence may hold a page, unless it is kept."""
        assert keeps_kv or self.num_free == self.num_pages, "pages are held across a weight swap"
        self._root = manifest_digest.encode()
        self._free = [*reversed(self._idle), *self._free]
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._content_of.clear()
        self._claims.clear()

    def lookup(self, seq: Sequence) -> list[int]:
        """The longest run of cached pages that begins `seq`; the last token is always left to compute."""
        if not self.may_share(seq):
            return []
        self._extend_keys(seq)
        hits: list[int] = []
        for index in range((len(seq.token_ids) - 1) // self.page_size):
            page = self._page_of.get(seq.page_keys[index])
            if page is None or self._content_of[page] != self._content(seq, index, hits):
                break
            hits.append(page)
        return hits

    def is_coming(self, seq: Sequence, num_hits: int) -> bool:
        """Whether an older running sequence is about to compute the first page that `lookup` missed."""
        if not self.may_share(seq) or num_hits >= (len(seq.token_ids) - 1) // self.page_size:
            return False
        owner = self._claims.get(seq.page_keys[num_hits])
        return owner is not None and owner.arrival < seq.arrival

    def allocate(self, seq: Sequence, hits: list[int], *, spare: int = 0) -> bool:
        """Gives `seq` the hits and new pages for the rest of its tokens; False, changing nothing, if too few are free.

        Args:
            seq: holds no pages.
            hits: of `lookup`, just now.
            spare: pages that must stay free afterwards.
        """
        assert not seq.pages
        num_new = self.num_pages_for(len(seq.token_ids)) - len(hits)
        num_free_hits = sum(self._references[page] == 0 for page in hits)
        if num_new + num_free_hits + spare > self.num_free:
            return False
        for page in hits:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1
        seq.pages = hits + [self._take() for _ in range(num_new)]
        seq.num_computed, seq.num_shared_pages = len(hits) * self.page_size, len(hits)
        if self.may_share(seq):
            for key in seq.page_keys[len(hits) : len(seq.token_ids) // self.page_size]:
                self._claims.setdefault(key, seq)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens in all; False, changing nothing, if too few are free."""
        num_new = self.num_pages_for(num_tokens) - len(seq.pages)
        if num_new > self.num_free:
            return False
        for _ in range(num_new):
            seq.pages.append(self._take())
        return True

    def advance(self, seq: Sequence, num_computed: int) -> None:
        """Records that keys and values exist up to `num_computed`, and caches the pages that this made full.

        A page whose last token is pending is cached by a later call, when its content is known.
        """
        seq.num_computed = num_computed
        first, page_size = seq.num_shared_pages, self.page_size
        if num_computed < (first + 1) * page_size or not self.may_share(seq):
            return
        end = min(num_computed, len(seq.token_ids)) // page_size
        seq.num_shared_pages = end
        self._extend_keys(seq)
        for index in range(first, end):
            key, page = seq.page_keys[index], seq.pages[index]
            if self._claims.get(key) is seq:
                del self._claims[key]
            is_behind_cached = index == 0 or self._key_of.get(seq.pages[index - 1]) == seq.page_keys[index - 1]
            if is_behind_cached and key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key
                self._content_of[page] = self._content(seq, index, seq.pages)

    def release(self, seq: Sequence) -> None:
        """Takes every page from `seq`; cached ones stay findable."""
        for key in seq.page_keys[seq.num_shared_pages :]:
            if self._claims.get(key) is seq:
                del self._claims[key]
        for page in reversed(seq.pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        seq.pages = []
        seq.num_computed = seq.num_shared_pages = 0

    def may_share(self, seq: Sequence) -> bool:
        """Whether full pages of `seq` may be found by others, and it may find theirs."""
        return self.shares_prefixes and seq.shares_pages and not seq.is_mixed

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)], self._content_of[page]
        self._references[page] = 1
        return page

    def _content(self, seq: Sequence, index: int, pages: list[int]) -> Content:
        return pages[index - 1] if index else None, self._page_tokens(seq, index)

    def _page_tokens(self, seq: Sequence, index: int) -> array[int]:
        return seq.token_ids[index * self.page_size : (index + 1) * self.page_size]

    def _extend_keys(self, seq: Sequence) -> None:
        keys = seq.page_keys
        for index in range(len(keys), len(seq.token_ids) // self.page_size):
            parent = keys[index - 1] if index else self._root
            keys.append(page_key(parent, self._page_tokens(seq, index)))


def page_key(parent: bytes, token_ids: array[int]) -> bytes:
    """Index of a page: a hash of everything that its keys and values depend on, weights included."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()
