"""By which tokens a page of a pool is found: prefixes as chains of pages.

What a page holds is told by its tokens and the page before it.
"""

from collections.abc import Iterator

import numpy as np

from pat_jax.models.cache.paged_layer import NULL_PAGE

Prefix = tuple[int, bytes]  # the page before, and the tokens of one, int32


class Prefixes:
    """The pages of one pool that can be found."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size, self._bytes = page_size, 4 * page_size  # of a full page's tokens
        self._page: dict[Prefix, int] = {}
        self._prefix: dict[int, Prefix] = {}
        self.has = np.zeros(num_pages, bool)  # by page

    def note(self, page: int, prefix: Prefix) -> None:
        """That a page is found by what it holds, and by nothing that it held before."""
        if page in self._prefix:
            del self._page[self._prefix[page]]
        self._page[prefix], self._prefix[page], self.has[page] = page, prefix, True

    def forget(self, page: int) -> None:
        del self._page[self._prefix.pop(page)]
        self.has[page] = False

    def find(self, data: bytes) -> list[int]:
        """The longest chain of pages that hold the beginning of `data`, or all of it."""
        found, before = [], NULL_PAGE
        for at in range(0, len(data), self._bytes):
            page = self._page.get((before, data[at : at + self._bytes]))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def enter(self, data: bytes, pages: np.ndarray, since: int) -> None:
        """The pages of `data` can be found from now on; the first `since` can be already."""
        size = self._bytes
        numbers = pages[: -(-len(data) // size)].tolist()
        before = numbers[since - 1] if since else NULL_PAGE
        for turn in range(since, len(numbers)):
            self.note(numbers[turn], (before, data[turn * size : (turn + 1) * size]))
            before = numbers[turn]

    def alike(self, page: int, origin: "Prefixes", before: int) -> int:
        """A page here, after `before`, with what a full `page` elsewhere holds, or NULL_PAGE."""
        prefix = origin._prefix.get(page)
        if prefix is None or len(prefix[1]) < self._bytes:
            return NULL_PAGE
        return self._page.get((before, prefix[1]), NULL_PAGE)

    def adopt(self, page: int, origin: "Prefixes", old_page: int, before: int) -> None:
        """That a page, after `before`, holds what `old_page` elsewhere does, if none does yet."""
        prefix = before, origin._prefix[old_page][1]
        if prefix not in self._page:
            self.note(page, prefix)

    def renumbered(self, number: np.ndarray) -> "Prefixes":
        """The same of pages with other numbers, int[pages]."""
        new = Prefixes(len(self.has), self.page_size)
        for page, (before, tokens) in self._prefix.items():
            new.note(int(number[page]), (int(number[before]), tokens))
        return new

    def follows(self, page: int, before: int) -> bool:
        """Whether a page is found behind this other one, if it is found at all."""
        return page not in self._prefix or self._prefix[page][0] == before

    def befores(self) -> Iterator[tuple[int, int]]:
        """Each page that is found behind another, and that other one."""
        for page, (before, _) in self._prefix.items():
            if before != NULL_PAGE:
                yield page, before

    def check_integrity(self, blank: np.ndarray) -> None:
        """
        Args:
          blank: int[pages], those that hold nothing of use.

        Raises:
          AssertionError: it contradicts itself, or finds one of these.
        """
        assert {page: prefix for prefix, page in self._page.items()} == self._prefix
        assert np.array_equal(np.flatnonzero(self.has), sorted(self._prefix))
        assert not self.has[blank].any(), "a blank page can be found"
