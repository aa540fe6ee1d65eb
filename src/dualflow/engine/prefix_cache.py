"""Which pages hold the keys of which tokens, so that a prompt's known beginning is not computed
again. No torch.

Only full pages are remembered. A block (the tokens of one page) is named by a hash over itself and
the name of the block before it, down to a root that stands for the model, its primary fan-out and
the tenant: what the keys of a block depend on, and nothing else. The auxiliary flow is no part of
it: it writes no keys. A hit is verified against the tokens themselves, so that two texts whose
hashes collide never share a page.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from dualflow.engine.pages import PagePool

_DIGEST_BYTES = 16


class Block(NamedTuple):
    """The tokens of one full page.

    key:       names them and all before them.
    previous:  the key of the block before; the root's for the first.
    tokens:    the ids as bytes.
    """

    key: bytes
    previous: bytes
    tokens: bytes


class PrefixCache:
    """Remembers full pages of ``pool`` by what they hold; the pool evicts, the longest unused
    first.

    model_key: says which model made the keys; for a mixture of experts its k_primary, too.
    """

    def __init__(self, pool: PagePool, model_key: str = "") -> None:
        self._pool = pool
        self._model_key = model_key
        self._pages: dict[bytes, tuple[Block, int]] = {}
        self._keys: dict[int, bytes] = {}
        self._inserted = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def version(self) -> int:
        """Grows with every insertion: as long as it stays, no lookup finds more than before."""
        return self._inserted

    def root_key(self, tenant: str) -> bytes:
        """What the first block of a tenant's sequences follows."""
        model, salt = self._model_key.encode(), tenant.encode("utf-8", "surrogatepass")
        text = len(model).to_bytes(8, "little") + model + salt
        return blake2b(text, digest_size=_DIGEST_BYTES).digest()

    def next_block(self, previous: bytes, tokens: Sequence[int]) -> Block:
        """The block of one page's ``tokens`` after the block (or root) whose key is
        ``previous``.
        """
        packed = array("q", tokens).tobytes()
        return Block(
            blake2b(previous + packed, digest_size=_DIGEST_BYTES).digest(), previous, packed
        )

    def blocks(self, tenant: str, tokens: Sequence[int]) -> list[Block]:
        """All full blocks of ``tokens``."""
        size, blocks = self._pool.page_size, []
        previous = self.root_key(tenant)
        for start in range(0, len(tokens) - size + 1, size):
            blocks.append(self.next_block(previous, tokens[start : start + size]))
            previous = blocks[-1].key
        return blocks

    def match(self, blocks: Sequence[Block]) -> list[int]:
        """Pages of the longest known beginning of ``blocks``. They are not shared yet: whoever
        uses them calls ``PagePool.share`` before anything is allocated.
        """
        pages = []
        for block in blocks:
            found = self._pages.get(block.key)
            if found is None or found[0] != block:
                break
            pages.append(found[1])
        return pages

    def insert(self, block: Block, page: int) -> bool:
        """Remember that ``page``, which has an owner, holds ``block``. False: another page is
        known to hold it already (two sequences computed it at once), and this one stays private.
        """
        if block.key in self._pages:
            return False
        assert page not in self._keys, f"page {page} is known to hold another block"
        self._pages[block.key] = (block, page)
        self._keys[page] = block.key
        self._pool.remember(page)
        self._inserted += 1
        return True

    def clear(self) -> None:
        """Forget everything, as after a change of weights."""
        for page in self._keys:
            self._pool.forget(page)
        self._pages.clear()
        self._keys.clear()

    def check(self) -> None:
        """Assert that the two directions agree, and every cached page is known."""
        assert len(self._pages) == len(self._keys), "a page is known twice"
        assert all(self._keys[page] == key for key, (_, page) in self._pages.items())
        assert self._pool.num_cached <= len(self._keys)

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
