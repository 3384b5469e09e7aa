"""Which sequence holds which page of the KV cache: host accounts, in NumPy and plain Python.

A page holds a run of `page_size` tokens of one sequence, or of several that begin alike. What a
full page holds is told by its tokens and the page before it, so that prefixes are found as chains.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pat_jax.models.paged_layer import NULL_PAGE

NO_PAGES = np.zeros(0, np.int32)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class Admitted:
    """What a sequence was given."""

    pages: np.ndarray  # int32[pages], in order of position
    num_cached: int  # first tokens that need no prefill: in shared pages, and in a copied one
    copy: tuple[int, int] | None  # (source, target) page, to be copied when all is prefilled


class PageAllocator:
    """The pages of one data-parallel group, counted by their holders.

    A page of known tokens that nobody holds any more can still be found, until it is needed for
    something else: the one let go longest ago first. Of a sequence the last pages are let go first,
    and who holds a page holds those before it: no page is ever found without those before it.

    A round of admissions is to be prefilled, then copied, before anything is released: pages found
    may be of a sequence admitted in the same round.
    """

    def __init__(self, num_pages: int, page_size: int):
        """
        Args:
          num_pages: NULL_PAGE among them.
          page_size: tokens.
        """
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing.")
        self.num_pages, self.page_size = num_pages, page_size
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, NULL_PAGE, -1))  # hold nothing of use
        self._idle: OrderedDict[int, None] = OrderedDict()  # without holder, but can be found
        self._index: dict[tuple[int, bytes], int] = {}  # (page before, tokens) -> page
        self._key: list[tuple[int, bytes] | None] = [None] * num_pages

    @property
    def capacity(self) -> int:
        """Pages that can be given out at most."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that could be had now, those included that can still be found."""
        return len(self._blank) + len(self._idle)

    @property
    def blank(self) -> np.ndarray:
        """Pages that hold nothing of use, int32[pages]."""
        return np.array(self._blank, np.int32)

    def admit(self, tokens: np.ndarray, room: int, *, leaving: int = 0) -> Admitted | None:
        """Pages for a sequence that is to be prefilled.

        Args:
          tokens: int[known], at least one; the newest is left to the first decode step.
          room: tokens to come, the newest known one among them.
          leaving: pages that are to be free then.

        Returns:
          Pages for `known - 1 + room` tokens; None, and nothing is changed, if there are too few.
        """
        cached = len(tokens) - 1
        data = np.ascontiguousarray(tokens[:cached], np.int32).tobytes()
        found = self._find(data)
        num_shared, source = len(found), None
        if (
            found
            and num_pages_for(cached, self.page_size) == num_shared
            and cached % self.page_size
        ):
            # The found part page will be written. One in use is copied, one let go is taken over.
            num_shared -= 1
            if self._holders[found[-1]]:
                source = found.pop()
        has_all = source is not None or len(found) > num_shared
        pages = self._hold(found, num_pages_for(cached + room, self.page_size), leaving)
        if pages is None:
            return None
        num_cached = cached if has_all else num_shared * self.page_size
        self._enter(data, pages, since=num_shared + has_all)
        copy = None if source is None else (source, pages[num_shared])
        return Admitted(np.array(pages, np.int32), num_cached, copy)

    def extend(self, pages: np.ndarray, num_tokens: int) -> np.ndarray | None:
        """`pages` of a sequence and as many more as hold `num_tokens` in all, int32[pages].

        None, and nothing is changed, if there are too few.
        """
        more = num_pages_for(num_tokens, self.page_size) - len(pages)
        if more <= 0:
            return pages
        taken = self._hold([], more)
        return None if taken is None else np.concatenate([pages, np.array(taken, np.int32)])

    def adopt(
        self, pages: np.ndarray, origin: "PageAllocator", moved: dict[int, int]
    ) -> tuple[np.ndarray, int] | None:
        """Pages for what a sequence has in another pool, when it moves here.

        Pages that are shared there are shared here, and found by the same tokens.

        Args:
          pages: int32[pages], those of the sequence that hold tokens, in `origin`.
          moved: where pages of `origin` have come to in this pool so far; updated.

        Returns:
          int32[pages], and how many of them, the first, need no move; None, and nothing is changed,
          if there are too few.
        """
        old, found, before = pages.tolist(), [], NULL_PAGE
        for page in old:
            new = moved.get(page)
            key = origin._key[page]
            if new is None and key is not None and len(key[1]) == 4 * self.page_size:
                new = self._index.get((before, key[1]))
            if new is None:
                break
            found.append(new)
            before = new
        num_found = len(found)
        new_pages = self._hold(found, len(old))
        if new_pages is None:
            return None
        for page, new in zip(old[num_found:], new_pages[num_found:], strict=True):
            moved[page] = new
            key = origin._key[page]
            if key is not None and (before, key[1]) not in self._index:
                self._index[before, key[1]], self._key[new] = new, (before, key[1])
            before = new
        return np.array(new_pages, np.int32), num_found

    def renumber(self, pages: np.ndarray, numbers: np.ndarray) -> None:
        """Gives `pages`, all that have a content, other `numbers`; int[pages] each."""
        holders, keys = self._holders, self._key
        number = dict(zip(pages.tolist(), numbers.tolist(), strict=True)) | {NULL_PAGE: NULL_PAGE}
        self._holders = [0] * self.num_pages
        self._index.clear()
        self._key = [None for _ in range(self.num_pages)]
        for page, new in number.items():
            self._holders[new], key = holders[page], keys[page]
            if key is not None:
                self._key[new] = key = (number[key[0]], key[1])
                self._index[key] = new
        blank = range(self.num_pages - 1, NULL_PAGE, -1)
        self._blank = [page for page in blank if not self._holders[page]]

    def release(self, pages: np.ndarray) -> None:
        """All pages of a sequence, in order of position."""
        for page in reversed(pages.tolist()):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is released, but nobody holds it.")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._key[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def discard(self, pages: np.ndarray) -> np.ndarray:
        """Releases pages whose content is spoilt; returns those that nobody holds now, int32[pages].

        Nothing admitted before is found any more: what follows a spoilt page is spoilt as well.
        """
        self.release(pages)
        self.forget_prefixes()
        return np.array([page for page in pages.tolist() if not self._holders[page]], np.int32)

    def forget_prefixes(self) -> None:
        """From now on nothing is found that was admitted before: the policy has changed."""
        self._index.clear()
        self._key = [None] * self.num_pages
        self._blank += self._idle
        self._idle.clear()

    def _find(self, data: bytes) -> list[int]:
        """The longest chain of pages that hold the beginning of `data`, or all of it."""
        found, before, size = [], NULL_PAGE, 4 * self.page_size
        for at in range(0, len(data), size):
            page = self._index.get((before, data[at : at + size]))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def _enter(self, data: bytes, pages: list[int], since: int) -> None:
        """The pages of `data` can be found from now on; the first `since` can be already."""
        size = 4 * self.page_size
        before = pages[since - 1] if since else NULL_PAGE
        for turn in range(since, -(-len(data) // size)):
            page = pages[turn]
            key = before, data[turn * size : (turn + 1) * size]
            self._index[key], self._key[page] = page, key
            before = page

    def _hold(self, found: list[int], total: int, leaving: int = 0) -> list[int] | None:
        """One more holder for the `found` pages and for others, `total` in all, if enough are left."""
        was_idle = [page for page in found if not self._holders[page]]
        if total - len(found) + leaving > self.num_free - len(was_idle):
            return None
        for page in was_idle:
            del self._idle[page]
        pages = found + [
            self._blank.pop() if self._blank else self._evict() for _ in range(total - len(found))
        ]
        for page in pages:
            self._holders[page] += 1
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        key, self._key[page] = self._key[page], None
        assert key is not None, "pages without a key are blank"
        del self._index[key]
