"""Where a sequence's keys live: pages at admission, growth, forks of a common prompt, release.
No torch.
"""

from typing import Literal

from dualflow.engine.drafts import NgramIndex
from dualflow.engine.pages import PagePool
from dualflow.engine.prefix_cache import Block, PrefixCache
from dualflow.engine.request import Request, Status


class Scheduled:
    """A live request, and what the scheduler knows of it beside.

    rank:             who goes first, the smallest before all; no two are equal.
    length:           ``request.length``, kept, for it is asked for in every step.
    write_from:       keys of positions below this are in the pages already.
    prompt_reported:  prompt rows whose log-probabilities have been asked for.
    last_step:        when it last had rows.
    blocks:           its tokens' full blocks, as far as they were needed; preemption keeps them.
    num_inserted:     how many of them the prefix cache has been told of.
    parent:           whose prompt's pages it waits for.
    """

    __slots__ = (
        "_page_tuple",
        "blocks",
        "last_step",
        "length",
        "ngrams",
        "num_inserted",
        "parent",
        "prompt_reported",
        "rank",
        "refused_at",
        "request",
        "write_from",
    )  # fmt: skip

    def __init__(self, request: Request, serial: int, parent: "Scheduled | None") -> None:
        self.request = request
        self.rank = (request.params.priority, request.arrival, serial)
        self.length = request.length
        self.write_from = 0
        self.prompt_reported = 0
        self.last_step = 0
        self.blocks: list[Block] = []
        self.num_inserted = 0
        self.parent = parent
        self.ngrams: NgramIndex | None = None
        self.refused_at: tuple[int, ...] | None = None
        self._page_tuple: tuple[int, ...] | None = None

    @property
    def owes_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be reported. A fork's are its
        parent's.
        """
        request = self.request
        wanted = request.params.prompt_logprobs is not None and request.parent is None
        return wanted and self.prompt_reported < len(request.prompt_ids) - 1

    def first_pages(self, count: int) -> tuple[int, ...]:
        """The first ``count`` pages; all of them cost nothing as long as they stay the same."""
        if self._page_tuple is None:
            self._page_tuple = tuple(self.request.pages)
        whole = self._page_tuple
        return whole if count == len(whole) else whole[:count]

    def pages_changed(self) -> None:
        self._page_tuple = None

    def start_of(self) -> Literal["own", "fork", "later"]:
        """How it starts: by itself; from its parent's pages; or not yet, for they are still to be
        computed. A parent that has ended is waited for no longer.
        """
        if self.parent is None:
            return "own"
        parent = self.parent.request
        if parent.status is Status.FINISHED:
            self.parent = None
            return "own"
        return "fork" if parent.num_computed >= len(self.request.prompt_ids) else "later"


class Placement:
    """Gives pages of ``pool`` to sequences, by way of ``cache`` where there is one."""

    def __init__(self, pool: PagePool, cache: PrefixCache | None) -> None:
        self.pool, self.cache = pool, cache
        self.prefix_queries = 0
        self.prefix_hits = 0

    def place(self, seq: Scheduled, reserve: int) -> tuple[tuple[int, int], ...] | None:
        """Give ``seq`` the pages of all its known tokens, if ``reserve`` more stay available.

        Returns the pages to copy before it runs; None: there are not enough pages, and none was
        taken. The prefix cache is read, unless the log-probabilities of every prompt position are
        wanted, for which every row must be computed.
        """
        if seq.parent is not None:
            return self._fork(seq, seq.parent.request, reserve)
        request, pool = seq.request, self.pool
        version = self.cache.version if self.cache is not None else 0
        now = (pool.num_available, version, reserve)
        if seq.refused_at == now:
            return None  # nothing has changed since: a long prompt is not matched in every step
        hits: list[int] = []
        if self.cache is not None and not seq.owes_prompt:
            self._complete_blocks(seq, seq.length // pool.page_size)
            hits = self.cache.match(seq.blocks)
        fresh = pool.pages_for(seq.length) - len(hits)
        unowned = sum(not pool.refcount(page) for page in hits)
        if fresh + unowned + reserve > pool.num_available:
            seq.refused_at = now
            return None
        pool.share(hits)  # first of all: allocation must not evict them
        request.pages = hits + pool.allocate(fresh)
        known = len(hits) * pool.page_size
        # The last position is computed even where its key is known: its distribution is wanted.
        request.num_computed = min(known, seq.length - 1)
        if not request.preemptions:
            request.cached_tokens = min(known, len(request.prompt_ids) - 1)
        if self.cache is not None and not seq.owes_prompt:
            self.prefix_queries += seq.length
            self.prefix_hits += request.num_computed
        seq.write_from, seq.num_inserted = known, len(hits)
        seq.pages_changed()
        return ()

    def grow(self, seq: Scheduled, num_positions: int) -> bool:
        """Make room for ``num_positions`` positions in all; False: there are not enough pages."""
        pages = seq.request.pages
        missing = self.pool.pages_for(num_positions) - len(pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        pages.extend(self.pool.allocate(missing))
        seq.pages_changed()
        return True

    def positions_available(self, seq: Scheduled) -> int:
        """How many positions ``grow`` could make room for."""
        return (len(seq.request.pages) + self.pool.num_available) * self.pool.page_size

    def settle(self, seq: Scheduled) -> None:
        """After a step: let others find the blocks that are complete now, and give back the pages
        of guesses that did not hold.
        """
        request, size = seq.request, self.pool.page_size
        complete = request.num_computed // size
        if self.cache is not None and complete > seq.num_inserted:
            self._complete_blocks(seq, complete)
            for i in range(seq.num_inserted, complete):
                self.cache.insert(seq.blocks[i], request.pages[i])
            seq.num_inserted = complete
        keep = self.pool.pages_for(seq.length)
        if len(request.pages) > keep:
            self.pool.release(request.pages[keep:])
            del request.pages[keep:]
            seq.pages_changed()

    def release(self, seq: Scheduled) -> None:
        """Take all pages away; what is known of the tokens stays."""
        self.pool.release(seq.request.pages)
        seq.request.pages = []
        seq.request.num_computed = seq.write_from = seq.num_inserted = 0
        seq.pages_changed()

    def _fork(
        self, seq: Scheduled, parent: Request, reserve: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Share the full pages of a computed prompt; the partial one is copied, for both go on to
        write into theirs.
        """
        prompt = len(seq.request.prompt_ids)
        full, rest = divmod(prompt, self.pool.page_size)
        own = 1 if rest else 0
        if own + reserve > self.pool.num_available:
            return None
        shared = parent.pages[:full]
        self.pool.share(shared)
        fresh = self.pool.allocate(own)
        seq.request.pages = shared + fresh
        seq.request.num_computed = seq.request.cached_tokens = prompt - 1
        seq.write_from, seq.num_inserted = prompt, full
        seq.parent = None
        seq.pages_changed()
        return ((parent.pages[full], fresh[0]),) if rest else ()

    def _complete_blocks(self, seq: Scheduled, count: int) -> None:
        cache, blocks, size = self.cache, seq.blocks, self.pool.page_size
        assert cache is not None
        if len(blocks) < count:
            previous = blocks[-1].key if blocks else cache.root_key(seq.request.tenant)
            for start in range(len(blocks) * size, count * size, size):
                blocks.append(cache.next_block(previous, seq.request.tokens(start, start + size)))
                previous = blocks[-1].key
