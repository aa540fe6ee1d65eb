import pytest

from dualflow.engine.pages import OutOfPagesError, PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_pages
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_a_new_pool_is_free_and_gives_pages_in_ascending_order():
    pool = PagePool(4, 8)
    assert counts(pool) == (4, 0, 0)
    assert pool.allocate(3) == [0, 1, 2]
    assert counts(pool) == (1, 0, 3)


def test_positions_take_whole_pages():
    pool = PagePool(4, 8)
    assert [pool.pages_for(n) for n in (0, 1, 8, 9, 32, 33)] == [0, 1, 1, 2, 4, 5]


@pytest.mark.parametrize("sizes", [(0, 8), (4, 0), (-1, 8), (True, 8), (4.0, 8)])
def test_sizes_are_whole_numbers_from_one(sizes):
    with pytest.raises(ValueError, match="expected a whole number from 1 up"):
        PagePool(*sizes)


def test_too_large_an_allocation_takes_nothing():
    pool = PagePool(4, 8)
    pages = pool.allocate(2)
    pool.remember(pages[1])
    pool.release([pages[1]])
    with pytest.raises(OutOfPagesError, match="4 pages are wanted; 2 are free and 1 cached of 4"):
        pool.allocate(4)
    assert counts(pool) == (2, 1, 1)


def test_a_shared_page_is_free_when_its_last_owner_has_gone():
    pool = PagePool(2, 8)
    [page] = pool.allocate(1)
    pool.share([page])
    assert pool.refcount(page) == 2
    pool.release([page])
    assert counts(pool) == (1, 0, 1)
    pool.release([page])
    assert counts(pool) == (2, 0, 0)


def test_a_remembered_page_is_cached_without_owners_and_can_be_shared_again():
    pool = PagePool(2, 8)
    [page] = pool.allocate(1)
    pool.remember(page)
    pool.release([page])
    assert counts(pool) == (1, 1, 0)
    pool.share([page])
    assert counts(pool) == (1, 0, 1)
    assert pool.refcount(page) == 1


def test_forgetting_a_page_without_owners_frees_it_and_others_later():
    pool = PagePool(2, 8)
    pages = pool.allocate(2)
    for page in pages:
        pool.remember(page)
    pool.release([pages[0]])
    pool.forget(pages[0])
    assert counts(pool) == (1, 0, 1)
    pool.forget(pages[1])
    assert not pool.is_remembered(pages[1])
    pool.release([pages[1]])
    assert counts(pool) == (2, 0, 0)
    pool.forget(pages[1])  # twice is fine
    assert counts(pool) == (2, 0, 0)


def test_the_page_unused_for_longest_is_evicted_first_and_the_hook_is_told():
    pool = PagePool(4, 8)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    first, second = pool.allocate(2), pool.allocate(2)
    for page in first + second:
        pool.remember(page)
    pool.release(second)
    pool.release(first)
    pool.share([second[1]])
    pool.release([second[1]])
    # Of one sequence the last page goes first: without those before it, it is worth nothing.
    assert pool.allocate(4) == [second[0], first[1], first[0], second[1]] == evicted
    assert counts(pool) == (0, 0, 4)
    assert not any(pool.is_remembered(page) for page in evicted)


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(3, 8)
    pages = pool.allocate(2)
    pool.remember(pages[0])
    pool.release(pages)
    assert pages[0] not in pool.allocate(2)
    assert counts(pool) == (0, 1, 2)


def test_giving_back_what_nobody_owns_is_a_fault():
    pool = PagePool(2, 8)
    [page] = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="has no owner"):
        pool.release([page])
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share([page])
    with pytest.raises(AssertionError, match="holds nothing to remember"):
        pool.remember(page)
