"""The pages of a pool: how many sequences hold each, and by which tokens it is found.

Host accounts, in NumPy and plain Python. A page holds `page_size` tokens of one sequence, or of
several that share a prefix: `prefixes.py` finds it again by its tokens.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.sequences.prefixes import Prefixes
from pat_jax.models.cache.paged_layer import NULL_PAGE

NO_PAGES = np.zeros(0, np.int32)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class Admitted:
    """The pages that a sequence was given."""

    pages: np.ndarray  # int32[pages], in order of position
    num_cached: int  # leading tokens that need no prefill: they are in shared or copied pages
    copy: tuple[int, int] | None  # (source, target) page, to copy after the prefill


class PageAllocator:
    """Counts the holders of each page of one replica.

    A page that no sequence holds any more can still be found by its tokens until it is evicted. The
    page released longest ago is evicted first. A sequence releases its last pages first, and holds
    all pages before each of its pages. So no page is ever found without those before it.

    A sequence may share pages with one admitted in the same round. So after a round of admissions,
    run the prefill, then the copies, and release pages only after that.
    """

    def __init__(self, num_pages: int, page_size: int):
        """Makes a pool of `num_pages` pages of `page_size` tokens, NULL_PAGE included."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._holders = np.zeros(num_pages, np.int32)
        # Pages without useful content: a stack of released ones, and all from `_untouched` on.
        self._blank = np.zeros(0, np.int32)
        self._num_blank = 0
        self._untouched = NULL_PAGE + 1
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable pages that no sequence holds
        self.prefixes = Prefixes(num_pages, page_size)

    @property
    def capacity(self) -> int:
        """The most pages that sequences can hold: all but NULL_PAGE."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """The number of pages that can be taken now, including cached pages without a holder."""
        return self._num_blank + self.num_pages - self._untouched + len(self._idle)

    @property
    def blank(self) -> np.ndarray:
        """The free pages that are not in the prefix index, int32[pages]."""
        untouched = np.arange(self._untouched, self.num_pages, dtype=np.int32)
        return np.concatenate([self._blank[: self._num_blank], untouched])

    def take(self, num_pages: int, *, leaving: int = 0) -> np.ndarray | None:
        """Takes and returns pages without content, int32[num_pages]; None if too few are free.

        Args:
          leaving: number of pages that must stay free.
        """
        return self._hold([], num_pages, leaving)

    def admit(self, tokens: np.ndarray, room: int, *, leaving: int = 0) -> Admitted | None:
        """Takes pages for a sequence to prefill, sharing those that hold its prefix.

        Args:
          tokens: int[known], at least one; the newest is left to the first decode step.
          room: number of tokens to have pages for beyond all of `tokens` but the newest.
          leaving: number of pages that must stay free.

        Returns:
          Pages for `known - 1 + room` tokens; None, without any change, if too few are free.
        """
        cached = len(tokens) - 1
        data = np.ascontiguousarray(tokens[:cached], np.int32).tobytes()
        found = self.prefixes.find(data)
        num_shared = len(found)
        source = None
        if (
            found
            and num_pages_for(cached, self.page_size) == num_shared
            and cached % self.page_size
        ):
            # The found partial page will be written: it is copied if held, else taken over.
            num_shared -= 1
            if self._holders[found[-1]]:
                source = found.pop()
        has_all = source is not None or len(found) > num_shared
        pages = self._hold(found, num_pages_for(cached + room, self.page_size), leaving)
        if pages is None:
            return None
        num_cached = cached if has_all else num_shared * self.page_size
        self.prefixes.enter(data, pages, since=num_shared + has_all)
        copy = None if source is None else (source, int(pages[num_shared]))
        return Admitted(pages, num_cached, copy)

    def index(self, tokens: np.ndarray, pages: np.ndarray) -> None:
        """Enters a sequence's `pages` in the prefix index under its tokens, to reuse them after a
        preemption.

        Args:
          tokens: int[known], prompt and response; all but the newest are in the pages.
        """
        data = np.ascontiguousarray(tokens[:-1], np.int32).tobytes()
        found = self.prefixes.find(data)
        # If another sequence has generated the same tokens, its pages are found. Then these are not
        # entered: their holder would not hold the pages before them.
        if found == pages[: len(found)].tolist():
            self.prefixes.enter(data, pages, since=len(found))

    def adopt(
        self, pages: np.ndarray, origin: "PageAllocator", moved: np.ndarray
    ) -> tuple[np.ndarray, int] | None:
        """Takes pages for a sequence that moves here from another pool.

        Pages that are shared in `origin` are shared here, and are found by the same tokens.

        Args:
          pages: int32[pages], the sequence's pages in `origin` that hold tokens.
          moved: int32[pages of origin], the page here to which each has moved so far, NULL_PAGE if
            to none; updated.

        Returns:
          The pages here, int32[pages], and how many of the first ones need no move. None, without
          any change, if too few are free.
        """
        found = self._moved_or_alike(pages, origin, moved)
        new_pages = self._hold(found, len(pages))
        if new_pages is None:
            return None
        num_found = len(found)
        moved[pages[num_found:]] = new_pages[num_found:]
        is_found = origin.prefixes.has[pages]
        is_found[:num_found] = False
        for turn in np.flatnonzero(is_found).tolist():
            before = int(new_pages[turn - 1]) if turn else NULL_PAGE
            page, old_page = int(new_pages[turn]), int(pages[turn])
            self.prefixes.adopt(page, origin.prefixes, old_page, before)
        return new_pages, num_found

    def _moved_or_alike(
        self, pages: np.ndarray, origin: "PageAllocator", moved: np.ndarray
    ) -> list[int]:
        """This pool's pages with the content of the first `pages`, up to one without a match."""
        found = []
        before = NULL_PAGE
        for page in pages:
            before = int(moved[page]) or self.prefixes.alike(int(page), origin.prefixes, before)
            if before == NULL_PAGE:
                break
            found.append(before)
        return found

    def renumber(self, pages: np.ndarray, numbers: np.ndarray) -> None:
        """Renumbers `pages`, all pages with content: page `pages[k]` becomes `numbers[k]`."""
        number = np.zeros(self.num_pages, np.int32)
        number[pages] = numbers
        holders = np.zeros_like(self._holders)
        holders[numbers] = self._holders[pages]
        self._holders = holders
        self._untouched = self.num_pages
        self._blank = np.flatnonzero(holders == 0)[:0:-1].astype(np.int32)  # all but NULL_PAGE
        self._num_blank = len(self._blank)
        self.prefixes = self.prefixes.renumbered(number)

    def release(self, *sequences: np.ndarray) -> None:
        """Releases all pages of some sequences, int32[pages] each in order of position."""
        pages = np.concatenate([NO_PAGES, *(pages[::-1] for pages in sequences)])
        is_shared = self._holders[pages] > 1
        # With exactly these types NumPy is thirty times as fast as with others.
        at = pages.astype(np.intp)
        one = np.int32(1)
        np.subtract.at(self._holders, at, one)
        unheld = pages[self._holders[pages] < 0]
        if len(unheld):
            np.add.at(self._holders, at, one)
            raise ValueError(f"page {unheld[0]} is released, but nobody holds it.")
        is_free = self._holders[pages] == 0
        # A page that several of the sequences held is released at its last place: after all pages
        # that follow it.
        again = np.flatnonzero(is_free & is_shared)
        is_free[again] = False
        is_free[again[::-1][np.unique(pages[again][::-1], return_index=True)[1]]] = True
        free = pages[is_free]
        can_be_found = self.prefixes.has[free]
        self._idle.update(dict.fromkeys(free[can_be_found].tolist()))
        self._push(free[~can_be_found])

    def discard(self, pages: np.ndarray) -> np.ndarray:
        """Releases pages with invalid content; returns those without a holder now, int32[pages].

        No page admitted before is found any more, because the pages after an invalid one are
        invalid, too."""
        self.release(pages)
        self.forget_prefixes()
        return pages[self._holders[pages] == 0]

    def forget_prefixes(self) -> None:
        """Empties the prefix index: no page is found by its tokens, because it may hold NaN."""
        self.prefixes = Prefixes(self.num_pages, self.page_size)
        self._push(np.array(list(self._idle), np.int32))
        self._idle.clear()

    def _push(self, pages: np.ndarray) -> None:
        """Adds pages to the stack of pages without useful content."""
        top = self._num_blank + len(pages)
        if top > len(self._blank):
            more = np.zeros(max(top, 2 * len(self._blank)) - len(self._blank), np.int32)
            self._blank = np.concatenate([self._blank, more])
        self._blank[self._num_blank : top] = pages
        self._num_blank = top

    def _hold(self, found: list[int], total: int, leaving: int = 0) -> np.ndarray | None:
        """Adds a holder to the pages `found` and to fresh ones. Returns these `total` pages, or
        None if too few are free."""
        was_idle = [page for page in found if page in self._idle]
        fresh = total - len(found)
        if fresh + leaving > self.num_free - len(was_idle):
            return None
        for page in was_idle:
            del self._idle[page]
        pages = self._fresh(fresh)
        if found:
            pages = np.concatenate([np.array(found, np.int32), pages])
        self._holders[pages] += 1
        return pages

    def _fresh(self, count: int) -> np.ndarray:
        """Takes blank pages, those released last first, then untouched ones, then evicts pages."""
        again = min(count, self._num_blank)
        self._num_blank -= again
        given = self._blank[self._num_blank : self._num_blank + again][::-1]
        if again == count:
            return given.copy()
        stop = min(self._untouched + count - again, self.num_pages)
        new = np.arange(self._untouched, stop, dtype=np.int32)
        self._untouched = stop
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count - again - len(new))]
        for page in evicted:
            self.prefixes.forget(page)
        return np.concatenate([given, new, np.array(evicted, np.int32)])

    def check_integrity(self, holders: np.ndarray) -> None:
        """Raises AssertionError if the accounts differ from `holders` or contradict each other.

        Args:
          holders: int[pages], how many sequences hold each page.
        """
        assert np.array_equal(self._holders, holders), "a page has other holders"
        idle = np.array(list(self._idle), np.int64)
        blank = self.blank
        pages = np.concatenate([np.flatnonzero(holders), idle, blank])
        assert np.array_equal(np.sort(pages), np.arange(NULL_PAGE + 1, self.num_pages)), (
            "every page is held, idle or blank, and only one of them"
        )
        self.prefixes.check_integrity(blank)
        order = {page: turn for turn, page in enumerate(self._idle)}
        for page, before in self.prefixes.befores():
            assert self.prefixes.has[before], "a page is found without those before it"
            is_kept = holders[before] > 0 or order[before] > order.get(page, math.inf)
            assert is_kept, "a page is let go before one that follows it"
