"""Whatever is inserted and evicted, a page that is found holds just the tokens that were asked for,
of the same tenant, and everything that is still there is found.
"""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dualflow.engine.drafts import NgramIndex, propose_ngram
from dualflow.engine.pages import PagePool
from dualflow.engine.prefix_cache import PrefixCache

tenants = st.sampled_from(["", "a"])
texts = st.lists(st.integers(0, 1), max_size=9)


class CacheMachine(RuleBasedStateMachine):
    """``content`` says for each page what was computed into it: the tenant and all tokens up to the
    page's last.
    """

    @initialize(num_pages=st.integers(1, 10), size=st.integers(1, 3))
    def start(self, num_pages, size):
        self.pool = PagePool(num_pages, size)
        self.cache = PrefixCache(self.pool, "model")
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.sequences: list[list[int]] = []

    def expected(self, tenant, tokens):
        """Pages found by looking at the contents of all pages that are remembered."""
        size, pages = self.pool.page_size, []
        for end in range(size, len(tokens) + 1, size):
            wanted = (tenant, tuple(tokens[:end]))
            found = [
                page
                for page, content in self.content.items()
                if content == wanted and self.pool.is_remembered(page)
            ]
            assert len(found) <= 1
            if not found:
                break
            pages += found
        return pages

    @rule(tenant=tenants, tokens=texts)
    def match(self, tenant, tokens):
        assert self.cache.match(self.cache.blocks(tenant, tokens)) == self.expected(tenant, tokens)

    @rule(tenant=tenants, tokens=texts, matches=st.booleans())
    def compute(self, tenant, tokens, matches):
        """A sequence reads what is known (or not), computes the rest and tells of it."""
        size = self.pool.page_size
        blocks = self.cache.blocks(tenant, tokens)
        hits = self.cache.match(blocks) if matches else []
        self.pool.share(hits)
        if len(blocks) - len(hits) > self.pool.num_available:
            self.pool.release(hits)
            return
        pages = hits + self.pool.allocate(len(blocks) - len(hits))
        for i in range(len(hits), len(blocks)):
            self.content[pages[i]] = (tenant, tuple(tokens[: (i + 1) * size]))
            known = bool(self.cache.match(blocks[: i + 1])[i:])
            inserted = self.cache.insert(blocks[i], pages[i])
            assert not (known and inserted)
        self.sequences.append(pages)

    @rule(data=st.data())
    def end(self, data):
        if self.sequences:
            self.pool.release(
                self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
            )

    @rule()
    def clear(self):
        self.cache.clear()
        assert len(self.cache) == self.pool.num_cached == 0

    @invariant()
    def pages_and_keys_agree(self):
        if hasattr(self, "pool"):
            self.pool.check()
            self.cache.check()
            remembered = sum(map(self.pool.is_remembered, range(self.pool.num_pages)))
            assert remembered == len(self.cache)


TestCache = CacheMachine.TestCase


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_the_ngram_index_guesses_what_a_scan_of_the_whole_text_does(pieces, count, max_n, min_n):
    index = NgramIndex(max_n, min_n)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.propose(count) == propose_ngram(text, count, max_n, min_n)
