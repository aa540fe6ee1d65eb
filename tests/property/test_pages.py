"""Any order of taking, sharing, remembering and giving back: every page is in one state, and the
pool agrees with a book kept beside it.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dualflow.engine.pages import OutOfPagesError, PagePool


class PoolMachine(RuleBasedStateMachine):
    """``owners`` holds the pages of each owner, ``cached`` those nobody owns, the oldest first."""

    @initialize(num_pages=st.integers(1, 9))
    def start(self, num_pages):
        self.pool = PagePool(num_pages, 4)
        self.owners: list[list[int]] = []
        self.remembered: set[int] = set()
        self.cached: list[int] = []
        self.pool.on_evict = self.evicted

    def evicted(self, page):
        assert self.cached.pop(0) == page
        self.remembered.remove(page)

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        taken = {page for pages in self.owners for page in pages}
        room = self.pool.num_pages - len(taken)
        try:
            pages = self.pool.allocate(count)
        except OutOfPagesError:
            assert count > room
            return
        assert count <= room
        assert len(set(pages)) == count and not taken & set(pages)
        assert not self.remembered & set(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.owners or self.cached)
    @rule(data=st.data())
    def share(self, data):
        held = {page for pages in self.owners for page in pages} | set(self.cached)
        pages = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        self.pool.share(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        keep = data.draw(st.integers(0, len(pages)))
        if keep:
            self.owners.append(pages[:keep])
        self.pool.release(pages[keep:])
        for page in reversed(pages[keep:]):
            if page in self.remembered and not any(page in other for other in self.owners):
                self.cached.append(page)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def remember(self, data):
        page = data.draw(st.sampled_from(sorted({p for pages in self.owners for p in pages})))
        self.pool.remember(page)
        self.remembered.add(page)

    @precondition(lambda self: self.remembered)
    @rule(data=st.data())
    def forget(self, data):
        page = data.draw(st.sampled_from(sorted(self.remembered)))
        self.pool.forget(page)
        self.remembered.remove(page)
        self.cached = [other for other in self.cached if other != page]

    @invariant()
    def every_page_is_in_one_state(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check()
        held = [page for pages in self.owners for page in pages]
        assert [pool.refcount(page) for page in range(pool.num_pages)] == [
            held.count(page) for page in range(pool.num_pages)
        ]
        assert pool.num_referenced == len(set(held))
        assert pool.num_cached == len(self.cached)
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_pages
        assert pool.num_available == pool.num_free + pool.num_cached
        assert {p for p in range(pool.num_pages) if pool.is_remembered(p)} == self.remembered

    def teardown(self):
        for pages in getattr(self, "owners", []):
            self.pool.release(pages)
        if hasattr(self, "pool"):
            assert self.pool.num_available == self.pool.num_pages


TestPool = PoolMachine.TestCase
