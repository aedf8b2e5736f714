"""Which full pages of tokens are computed already: a radix tree over pages, per salt, with LRU eviction."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_svc.scheduler.page_keys import prefix_id, root_id
from scheduler_svc.scheduler.page_ledger import LedgerError, PageLedger


@dataclass(eq=False, slots=True)
class CacheNode:
    """One full page of tokens behind the pages of its ancestors."""

    salt: str
    key: bytes  # its token ids
    page: int
    parent: CacheNode | None
    draft_kv: int  # bit mask of the methods whose draft KV the page holds too
    prefix_id: int  # see page_keys.py
    path_kv: int  # methods whose draft KV this page and all before it hold; may lack what was marked later
    children: dict[bytes, CacheNode] = field(default_factory=dict)
    last_used: int = 0
    in_tree: bool = True


class PrefixCache:
    """Pages enter when the step that completed them has retired: a hit never reads what is being written.

    A sequence that holds a node holds all of its ancestors. So the references of a path never grow downwards,
    and whatever nobody holds can be evicted leaf by leaf.
    """

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._roots: dict[str, dict[bytes, CacheNode]] = {}
        self._by_prefix_id: dict[int, CacheNode] = {}
        self._num_nodes = 0
        self._clock = 0
        self._serial = 0
        # (last use, tie-breaker, leaf); entries that no longer hold are skipped when they come up
        self._evictable: list[tuple[int, int, CacheNode]] = []

    @property
    def num_nodes(self) -> int:
        """Pages in the tree, held or not."""
        return self._num_nodes

    def find(self, salt: str, parent: CacheNode | None, key: bytes) -> CacheNode | None:
        """The node of the page `key` behind `parent` (None: at the start of a sequence), if there is one."""
        return self._children(salt, parent).get(key)

    def depth_of(self, prefix_ids: Sequence[int], num_pages: int, methods: int) -> int:
        """How many of the first `num_pages` pages are here, with draft KV of all `methods` (of hidden states).

        By numbers alone, so only for counting. If a beginning is here, all shorter ones are too: a few looks do.
        """
        known = self._by_prefix_id
        low, high = 0, num_pages
        while low < high:
            middle = (low + high) // 2
            node = known.get(prefix_ids[middle])
            if node is not None and node.path_kv & methods == methods:
                low = middle + 1
            else:
                high = middle
        return low

    def hold(self, node: CacheNode) -> None:
        """One more sequence uses the node's page; it must hold the ancestors already."""
        self._ledger.share(node.page)

    def let_go(self, nodes: list[CacheNode]) -> None:
        """A sequence releases its path, root first in `nodes`; what nobody holds becomes the latest used."""
        self._clock += 1
        for node in nodes:
            self._ledger.give_back(node.page, None)
            node.last_used = self._clock
        if nodes:
            self._offer(nodes[-1])

    def insert(self, salt: str, parent: CacheNode | None, key: bytes, page: int, draft_kv: int) -> CacheNode:
        """Adds a complete page that its sequence holds; there must be no node for this key yet."""
        number = prefix_id(root_id(salt) if parent is None else parent.prefix_id, key)
        path_kv = draft_kv if parent is None else draft_kv & parent.path_kv
        node = CacheNode(salt, key, page, parent, draft_kv, number, path_kv, last_used=self._clock)
        siblings = self._children(salt, parent)
        assert key not in siblings, "two nodes for one prefix"
        self._ledger.enter_cache(page)
        siblings[key] = node
        if parent is None:
            self._roots[salt] = siblings
        self._by_prefix_id[number] = node
        self._num_nodes += 1
        return node

    def replace_page(self, node: CacheNode, page: int, draft_kv: int) -> None:
        """An unheld node takes over a better copy of its page from the sequence that filled it."""
        self._ledger.leave_cache(node.page)
        self._ledger.enter_cache(page)
        node.page = page
        node.draft_kv = draft_kv
        outdated = [node]
        while outdated:
            node = outdated.pop()
            node.path_kv = node.draft_kv if node.parent is None else node.draft_kv & node.parent.path_kv
            outdated.extend(node.children.values())

    def evict(self, count: int) -> None:
        """Frees `count` pages that nobody holds, least recently used leaf first."""
        while count > 0:
            if not self._evictable:
                raise LedgerError(f"{count} more pages to evict, but every cached page is held")
            last_used, _, node = heapq.heappop(self._evictable)
            if node.last_used == last_used and self._is_evictable(node):
                self._remove(node)
                count -= 1

    def flush(self) -> None:
        """Evicts everything that nobody holds."""
        self.evict(self._ledger.num_cached)

    def pages(self) -> list[int]:
        """The pages of all nodes (for integrity checks)."""
        return [node.page for node in self._nodes()]

    def check(self) -> None:
        """Raises LedgerError unless the tree is well formed and every evictable leaf can be found."""
        nodes = list(self._nodes())
        if len(nodes) != self._num_nodes:
            raise LedgerError(f"{len(nodes)} nodes in the tree, counted {self._num_nodes}")
        offered = {id(node) for last_used, _, node in self._evictable if node.last_used == last_used}
        for node in nodes:
            references, parent = self._ledger.references(node.page), node.parent
            if parent is not None and self._ledger.references(parent.page) < references:
                raise LedgerError(f"page {node.page} is held more often than its ancestor {parent.page}")
            path_kv = node.draft_kv if parent is None else node.draft_kv & parent.path_kv
            if node.path_kv & ~path_kv or self._by_prefix_id.get(node.prefix_id) is not node:
                raise LedgerError(f"page {node.page} is counted with draft KV that it lacks, or not at all")
            if self._is_evictable(node) and id(node) not in offered:
                raise LedgerError(f"page {node.page} can be evicted, but would never be found")

    def _children(self, salt: str, parent: CacheNode | None) -> dict[bytes, CacheNode]:
        return self._roots.get(salt, {}) if parent is None else parent.children

    def _is_evictable(self, node: CacheNode) -> bool:
        return node.in_tree and not node.children and self._ledger.references(node.page) == 0

    def _offer(self, node: CacheNode) -> None:
        if not self._is_evictable(node):
            return
        self._serial += 1
        heapq.heappush(self._evictable, (node.last_used, self._serial, node))
        # Without pressure nothing is popped: drop outdated entries before they outnumber the nodes.
        if len(self._evictable) > 2 * self._num_nodes + 64:
            leaves = [node for node in self._nodes() if self._is_evictable(node)]
            self._evictable = [(leaf.last_used, i, leaf) for i, leaf in enumerate(leaves)]
            heapq.heapify(self._evictable)
            self._serial = len(leaves)

    def _remove(self, node: CacheNode) -> None:
        siblings = self._children(node.salt, node.parent)
        del siblings[node.key]
        node.in_tree = False
        self._by_prefix_id.pop(node.prefix_id, None)
        self._num_nodes -= 1
        self._ledger.leave_cache(node.page)
        if node.parent is not None:
            self._offer(node.parent)
        elif not siblings:
            del self._roots[node.salt]

    def _nodes(self) -> Iterator[CacheNode]:
        stack = [node for root in self._roots.values() for node in root.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
