"""Who owns which page of the KV cache: allocate, share, release, remember. No torch.

Every page is in exactly one of three states: *referenced* by at least one sequence; *cached*, by
nobody referenced but remembered by the prefix cache, which hears of it when the page is taken for
something else; or *free*.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence


class OutOfPagesError(RuntimeError):
    """More pages are wanted than could be given, the cached ones included."""


class PagePool:
    """Pages 0 to ``num_pages`` - 1 of ``page_size`` positions each.

    ``on_evict`` is called with each page that is remembered no longer because an allocation took
    it; what it holds is about to be overwritten.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number from 1 up")
        self.num_pages, self.page_size = num_pages, page_size
        self.on_evict: Callable[[int], None] | None = None
        self._refcounts = [0] * num_pages
        self._remembered = bytearray(num_pages)
        # Taken from the end, so that pages are used in ascending order at first.
        self._free = list(range(num_pages - 1, -1, -1))
        # The page that was used longest ago comes first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody references and the prefix cache remembers."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` could give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Pages that sequences own, each counted once however many share it."""
        return self.num_pages - len(self._free) - len(self._cached)

    def pages_for(self, num_positions: int) -> int:
        """How many pages ``num_positions`` positions take."""
        return -(-num_positions // self.page_size)

    def refcount(self, page: int) -> int:
        """How many sequences own ``page``."""
        return self._refcounts[page]

    def is_remembered(self, page: int) -> bool:
        """Whether the prefix cache knows what ``page`` holds, so that it must stay as it is."""
        return bool(self._remembered[page])

    def allocate(self, count: int) -> list[int]:
        """``count`` pages for one owner. Free ones first, then those cached ones that were used
        longest ago. Raises ``OutOfPagesError``, and takes nothing, where there are fewer.
        """
        if count > self.num_available:
            raise OutOfPagesError(
                f"{count} pages are wanted; {self.num_free} are free and {self.num_cached} cached "
                f"of {self.num_pages}"
            )
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._refcounts[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each of ``pages``, which are referenced or cached."""
        for page in pages:
            if not self._refcounts[page]:
                assert page in self._cached, f"page {page} is free and cannot be shared"
                del self._cached[page]
            self._refcounts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner fewer for each of ``pages``, given in the order of their positions: the last
        will be evicted first, for a page is worth nothing without those before it.
        """
        for page in reversed(pages):
            assert self._refcounts[page] > 0, f"page {page} is released and has no owner"
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                if self._remembered[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def remember(self, page: int) -> None:
        """Keep what ``page`` holds after its last owner has gone, as long as room allows."""
        assert self._refcounts[page] > 0, f"page {page} has no owner and holds nothing to remember"
        self._remembered[page] = 1

    def forget(self, page: int) -> None:
        """Undo ``remember``: a page without owners is free again."""
        if self._remembered[page]:
            self._remembered[page] = 0
            if not self._refcounts[page]:
                del self._cached[page]
                self._free.append(page)

    def check(self) -> None:
        """Assert that each page is in exactly one state: for tests, and for engines at rest."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, f"free and cached at once: {sorted(free & cached)}"
        for page, count in enumerate(self._refcounts):
            assert count >= 0, f"page {page} has {count} owners"
            assert (count > 0) == (page not in free and page not in cached), (
                f"page {page} with {count} owners is {'free' if page in free else 'cached or lost'}"
            )
            assert page not in cached or self._remembered[page], f"page {page} is cached for nobody"
            assert page not in free or not self._remembered[page], f"page {page} is not quite free"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._remembered[page] = 0
        if self.on_evict is not None:
            self.on_evict(page)
        return page
