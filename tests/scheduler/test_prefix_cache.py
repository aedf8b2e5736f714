"""The tree of cached pages: salts, order of eviction, what is held stays."""

from __future__ import annotations

import pytest

from scheduler_svc.scheduler.page_ledger import LedgerError, PageLedger
from scheduler_svc.scheduler.prefix_cache import CacheNode, PrefixCache


class Tree:
    """A cache with helpers that behave like sequences: a path is inserted, held, let go."""

    def __init__(self, num_pages: int) -> None:
        self.ledger = PageLedger(num_pages)
        self.cache = PrefixCache(self.ledger)

    def run(self, *keys: str, salt: str = "") -> list[CacheNode]:
        """A sequence that holds the path `keys`, computing the pages that are missing."""
        path: list[CacheNode] = []
        for key in keys:
            parent = path[-1] if path else None
            node = self.cache.find(salt, parent, key.encode())
            if node is not None:
                self.cache.hold(node)
            else:
                if not self.ledger.num_free:
                    self.cache.evict(1)
                (page,) = self.ledger.take(1)
                node = self.cache.insert(salt, parent, key.encode(), page, draft_kv=0)
            path.append(node)
        return path

    def done(self, path: list[CacheNode]) -> None:
        self.cache.let_go(path)
        self.cache.check()

    def has(self, *keys: str, salt: str = "") -> bool:
        node = None
        for key in keys:
            node = self.cache.find(salt, node, key.encode())
            if node is None:
                return False
        return True


def test_paths_share_their_beginning() -> None:
    tree = Tree(8)
    first = tree.run("a", "b", "c")
    second = tree.run("a", "b", "d")
    assert [node.page for node in first[:2]] == [node.page for node in second[:2]]
    assert tree.cache.num_nodes == 4
    assert tree.ledger.references(first[0].page) == 2


def test_salts_do_not_share() -> None:
    tree = Tree(8)
    tree.run("a", salt="one")
    assert tree.has("a", salt="one")
    assert not tree.has("a", salt="two")
    assert not tree.has("a")


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree(4)
    tree.done(tree.run("a"))
    tree.done(tree.run("b", "x"))
    tree.done(tree.run("a"))  # used again: now b and x are older
    tree.cache.evict(1)
    assert tree.has("b")
    assert not tree.has("b", "x")
    tree.cache.evict(1)
    assert not tree.has("b")
    assert tree.has("a")


def test_a_held_path_survives_and_its_ancestors_too() -> None:
    tree = Tree(4)
    held = tree.run("a", "b")
    tree.done(tree.run("a", "c"))
    tree.cache.evict(1)
    assert tree.has("a", "b")
    assert not tree.has("a", "c")
    with pytest.raises(LedgerError, match="every cached page is held"):
        tree.cache.evict(1)
    tree.done(held)
    tree.cache.flush()
    assert tree.ledger.num_free == 4
    assert tree.cache.num_nodes == 0


def test_a_parent_is_evicted_in_its_own_turn() -> None:
    tree = Tree(6)
    tree.done(tree.run("a", "x"))
    tree.done(tree.run("b"))
    tree.done(tree.run("a"))  # the parent is newer than b, its child x is the oldest
    tree.cache.evict(2)
    assert tree.has("a")
    assert not tree.has("a", "x")
    assert not tree.has("b")


def test_outdated_entries_do_not_pile_up() -> None:
    tree = Tree(4)
    for _ in range(1000):
        tree.done(tree.run("a", "b"))
    assert len(tree.cache._evictable) < 100
    tree.cache.flush()
    assert tree.ledger.num_free == 4


def test_a_page_can_be_replaced_by_a_better_copy() -> None:
    tree = Tree(4)
    path = tree.run("a")
    tree.done(path)
    old = path[0].page
    (own,) = tree.ledger.take(1)
    tree.cache.replace_page(path[0], own, draft_kv=12)
    assert path[0].page == own
    assert path[0].draft_kv == 12
    tree.ledger.check([[own]], [own])
    assert tree.ledger.references(old) == 0
    assert tree.ledger.num_free == 3


def test_the_depth_by_numbers_follows_eviction_and_pages_that_lose_draft_kv() -> None:
    tree = Tree(8)
    path = tree.run("aaaa", "bbbb", "cccc")
    tree.done(path)
    for node in path:
        _refill(tree, node, draft_kv=3)
    prefix_ids = [node.prefix_id for node in path]

    def depths() -> list[int]:
        return [tree.cache.depth_of(prefix_ids, 3, methods) for methods in (0, 1, 2, 3)]

    assert depths() == [3, 3, 3, 3]
    assert tree.cache.depth_of(prefix_ids, 2, 0) == 2
    _refill(tree, path[1], draft_kv=1)
    assert depths() == [3, 3, 1, 1]  # what lies behind it still has the KV, but cannot be reached with it
    tree.cache.check()
    tree.cache.evict(1)
    assert depths() == [2, 2, 1, 1]
    tree.cache.flush()
    assert depths() == [0, 0, 0, 0]
    other = tree.run("aaaa", salt="salt")
    assert depths() == [0, 0, 0, 0]
    assert tree.cache.depth_of([other[0].prefix_id], 1, 0) == 1


def _refill(tree: Tree, node: CacheNode, draft_kv: int) -> None:
    """A sequence puts its own copy in the place of a page that nobody holds, and leaves."""
    (page,) = tree.ledger.take(1)
    tree.cache.replace_page(node, page, draft_kv)
    tree.cache.let_go([node])
