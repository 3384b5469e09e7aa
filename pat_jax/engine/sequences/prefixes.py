"""Finds pages of a pool by tokens, for prefix caching: a prefix is a chain of pages.

A page's content is identified by its tokens and the page before it.
"""

from collections.abc import Iterator

import numpy as np

from pat_jax.models.cache.paged_layer import NULL_PAGE

Prefix = tuple[int, bytes]  # the page before a page, and the page's tokens as int32 bytes


class Prefixes:
    """An index of one pool's pages by their tokens and the page before them, for prefix caching."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._bytes = 4 * page_size  # bytes of a full page's tokens
        self._page: dict[Prefix, int] = {}
        self._prefix: dict[int, Prefix] = {}
        self.has = np.zeros(num_pages, bool)  # whether each page is in the index

    def note(self, page: int, prefix: Prefix) -> None:
        """Enters a page under its content, and removes the entry of its previous content."""
        if page in self._prefix:
            del self._page[self._prefix[page]]
        self._page[prefix] = page
        self._prefix[page] = prefix
        self.has[page] = True

    def forget(self, page: int) -> None:
        del self._page[self._prefix.pop(page)]
        self.has[page] = False

    def find(self, data: bytes) -> list[int]:
        """Returns the pages of the longest prefix of `data`, tokens as int32 bytes, that is in the
        pool."""
        found = []
        before = NULL_PAGE
        for at in range(0, len(data), self._bytes):
            page = self._page.get((before, data[at : at + self._bytes]))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def enter(self, data: bytes, pages: np.ndarray, since: int) -> None:
        """Enters the pages of `data`, tokens as int32 bytes, except the first `since` pages."""
        size = self._bytes
        numbers = pages[: -(-len(data) // size)].tolist()
        before = numbers[since - 1] if since else NULL_PAGE
        for turn in range(since, len(numbers)):
            self.note(numbers[turn], (before, data[turn * size : (turn + 1) * size]))
            before = numbers[turn]

    def alike(self, page: int, origin: "Prefixes", before: int) -> int:
        """Returns this pool's page that follows page `before` and has the content of the full page
        `page` in the pool of `origin`. Returns NULL_PAGE if there is none."""
        prefix = origin._prefix.get(page)
        if prefix is None or len(prefix[1]) < self._bytes:
            return NULL_PAGE
        return self._page.get((before, prefix[1]), NULL_PAGE)

    def adopt(self, page: int, origin: "Prefixes", old_page: int, before: int) -> None:
        """Enters a page, which follows page `before`, under the content of `old_page` in the pool
        of `origin`.

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
        """Returns whether a page is entered as the page after `before`, or not entered at all."""
        return page not in self._prefix or self._prefix[page][0] == before

    def befores(self) -> Iterator[tuple[int, int]]:
        """Yields (page, page before it) for each page that is entered as the successor of
        another."""
        for page, (before, _) in self._prefix.items():
            if before != NULL_PAGE:
                yield page, before

    def check_integrity(self, blank: np.ndarray) -> None:
        """Raises AssertionError if the index contradicts itself, or a blank page is in it.

        Args:
          blank: int[pages], pages without useful content.
        """
        assert {page: prefix for prefix, page in self._page.items()} == self._prefix
        assert np.array_equal(np.flatnonzero(self.has), sorted(self._prefix))
        assert not self.has[blank].any(), "a blank page can be found"
