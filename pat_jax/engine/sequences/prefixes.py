"""Finds pages of a pool by tokens, for prefix caching: a prefix is a chain of pages.

A page's content is identified by its tokens and the page before it.
"""

from collections.abc import Iterator

import numpy as np

from pat_jax.models.cache.paged_layer import NULL_PAGE

Prefix = tuple[int, bytes]  # the page before a page, and its tokens, int32


class Prefixes:
    """The pages of one pool that can be found."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size, self._bytes = page_size, 4 * page_size  # of a full page's tokens
        self._page: dict[Prefix, int] = {}
        self._prefix: dict[int, Prefix] = {}
        self.has = np.zeros(num_pages, bool)  # by page

    def note(self, page: int, prefix: Prefix) -> None:
        """Makes a page findable by its content, and no longer by what it held before."""
        if page in self._prefix:
            del self._page[self._prefix[page]]
        self._page[prefix], self._prefix[page], self.has[page] = page, prefix, True

    def forget(self, page: int) -> None:
        del self._page[self._prefix.pop(page)]
        self.has[page] = False

    def find(self, data: bytes) -> list[int]:
        """Returns the longest chain of pages that hold the beginning of `data`, or all of it."""
        found, before = [], NULL_PAGE
        for at in range(0, len(data), self._bytes):
            page = self._page.get((before, data[at : at + self._bytes]))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def enter(self, data: bytes, pages: np.ndarray, since: int) -> None:
        """Makes the pages of `data` findable; the first `since` pages are already."""
        size = self._bytes
        numbers = pages[: -(-len(data) // size)].tolist()
        before = numbers[since - 1] if since else NULL_PAGE
        for turn in range(since, len(numbers)):
            self.note(numbers[turn], (before, data[turn * size : (turn + 1) * size]))
            before = numbers[turn]

    def alike(self, page: int, origin: "Prefixes", before: int) -> int:
        """Returns the page here, after `before`, with the content of another pool's full `page`.

        Returns NULL_PAGE if there is none."""
        prefix = origin._prefix.get(page)
        if prefix is None or len(prefix[1]) < self._bytes:
            return NULL_PAGE
        return self._page.get((before, prefix[1]), NULL_PAGE)

    def adopt(self, page: int, origin: "Prefixes", old_page: int, before: int) -> None:
        """Makes a page, after `before`, findable by the content of another pool's `old_page`.

        Does nothing if another page here has that content."""
        prefix = before, origin._prefix[old_page][1]
        if prefix not in self._page:
            self.note(page, prefix)

    def renumbered(self, number: np.ndarray) -> "Prefixes":
        """Returns the same prefixes with other page numbers, int[pages]."""
        new = Prefixes(len(self.has), self.page_size)
        for page, (before, tokens) in self._prefix.items():
            new.note(int(number[page]), (int(number[before]), tokens))
        return new

    def follows(self, page: int, before: int) -> bool:
        """Returns whether a page is found only after page `before`, or not at all."""
        return page not in self._prefix or self._prefix[page][0] == before

    def befores(self) -> Iterator[tuple[int, int]]:
        """Yields each page that is found after another, and that other page."""
        for page, (before, _) in self._prefix.items():
            if before != NULL_PAGE:
                yield page, before

    def check_integrity(self, blank: np.ndarray) -> None:
        """Checks the accounts.

        Args:
          blank: int[pages], pages without useful content.

        Raises:
          AssertionError: the accounts contradict each other, or a blank page can be found.
        """
        assert {page: prefix for prefix, page in self._page.items()} == self._prefix
        assert np.array_equal(np.flatnonzero(self.has), sorted(self._prefix))
        assert not self.has[blank].any(), "a blank page can be found"
