import pytest

from dualflow.engine.pages import PagePool
from dualflow.engine.prefix_cache import Block, PrefixCache

TEXT = list(range(100, 110))


def new_cache(num_pages: int = 8, model_key: str = "model") -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages, 4)
    return pool, PrefixCache(pool, model_key)


def remember(pool: PagePool, cache: PrefixCache, tokens: list[int], tenant: str = "") -> list[int]:
    """A sequence computes ``tokens`` and ends; the pages of its full blocks."""
    blocks = cache.blocks(tenant, tokens)
    pages = pool.allocate(len(blocks))
    for block, page in zip(blocks, pages, strict=True):
        cache.insert(block, page)
    pool.release(pages)
    pool.check()
    cache.check()
    return pages


def test_only_full_blocks_are_known():
    pool, cache = new_cache()
    pages = remember(pool, cache, TEXT)
    assert len(pages) == len(cache) == 2
    assert cache.match(cache.blocks("", TEXT)) == pages
    assert cache.match(cache.blocks("", TEXT[:7])) == pages[:1]
    assert cache.match(cache.blocks("", TEXT[:3])) == []


def test_a_match_ends_at_the_first_block_that_differs():
    pool, cache = new_cache()
    pages = remember(pool, cache, TEXT)
    assert cache.match(cache.blocks("", [*TEXT[:5], 7, *TEXT[6:]])) == pages[:1]
    assert cache.match(cache.blocks("", [7, *TEXT[1:]])) == []


def test_a_block_is_known_by_all_tokens_before_it():
    pool, cache = new_cache()
    remember(pool, cache, TEXT)
    assert cache.match(cache.blocks("", TEXT[4:])) == []


def test_the_same_tokens_after_another_beginning_are_another_block():
    pool, cache = new_cache()
    one, two = [1, 2, 3, 4, *TEXT[:4]], [5, 6, 7, 8, *TEXT[:4]]
    pages = [remember(pool, cache, text) for text in (one, two)]
    assert [cache.match(cache.blocks("", text)) for text in (one, two)] == pages
    assert len(cache) == 4


@pytest.mark.parametrize("tenant", ["other", "\ud800", "", "a"])
def test_tenants_do_not_see_each_other(tenant):
    pool, cache = new_cache()
    remember(pool, cache, TEXT, "one")
    assert cache.match(cache.blocks(tenant, TEXT)) == []


def test_the_root_tells_model_and_tenant_apart():
    keys = {new_cache(model_key=m)[1].root_key(t) for m, t in [("ab", "c"), ("a", "bc"), ("", "")]}
    assert len(keys) == 3


def test_two_texts_with_one_hash_do_not_share_a_page():
    pool, cache = new_cache()
    [block] = cache.blocks("", TEXT[:4])
    [page] = pool.allocate(1)
    cache.insert(block, page)
    other = Block(block.key, block.previous, bytes(32))
    moved = Block(block.key, bytes(16), block.tokens)
    assert cache.match([other]) == cache.match([moved]) == []
    assert not cache.insert(other, pool.allocate(1)[0])
    assert cache.match([block]) == [page]


def test_the_second_page_of_a_known_block_stays_private():
    pool, cache = new_cache()
    [block] = cache.blocks("", TEXT[:4])
    first, second = pool.allocate(2)
    assert cache.insert(block, first)
    assert not cache.insert(block, second)
    pool.release([first, second])
    assert (pool.num_free, pool.num_cached) == (7, 1)


def test_an_evicted_page_is_not_found_again():
    pool, cache = new_cache(num_pages=2)
    pages = remember(pool, cache, TEXT)
    assert pool.allocate(1) == pages[1:]
    assert cache.match(cache.blocks("", TEXT)) == pages[:1]
    pool.allocate(1)
    assert cache.match(cache.blocks("", TEXT)) == []
    assert len(cache) == 0
    cache.check()


def test_a_block_whose_forerunner_was_evicted_is_found_when_that_is_back():
    pool, cache = new_cache(num_pages=3)
    pages = remember(pool, cache, TEXT)
    pool.share(pages[1:])
    pool.allocate(2)  # evicts the first block alone
    blocks = cache.blocks("", TEXT)
    assert cache.match(blocks) == []
    pool.release([2])
    [page] = pool.allocate(1)
    cache.insert(blocks[0], page)
    assert cache.match(blocks) == [page, pages[1]]


def test_clear_forgets_owned_pages_too():
    pool, cache = new_cache()
    remember(pool, cache, TEXT)
    blocks = cache.blocks("", TEXT[4:8])
    owned = pool.allocate(1)
    cache.insert(blocks[0], owned[0])
    cache.clear()
    assert (pool.num_free, pool.num_cached, len(cache)) == (7, 0, 0)
    pool.release(owned)
    pool.check()
    assert pool.num_free == 8


def test_the_version_grows_with_what_can_be_found():
    pool, cache = new_cache()
    before = cache.version
    remember(pool, cache, TEXT)
    grown = cache.version
    assert grown > before
    remember(pool, cache, TEXT)
    assert cache.version == grown
