"""Moves pages between sequences, ledger and prefix cache; the only writer of a sequence's page list.

A sequence's pages are `cache_nodes` (shared, complete, never written again) followed by private ones. Draft KV lives
in the same pages: a cached page knows the methods whose KV it holds. A drafter that reads the target's hidden states
can fill in nothing behind the target's back, so all cache_nodes of a sequence hold the KV of those that follow it; the
draft model fills in what a shared page lacks, since its KV depends on the tokens alone. Surplus
pages go back whenever a result is applied: the ledger then says what sequences need, and no idle page keeps
another sequence waiting. The worker may still list such pages; it writes only what the tokens it knows call for.
"""

from __future__ import annotations

from collections.abc import Collection

from scheduler_svc.scheduler.page_ledger import LedgerError, PageLedger
from scheduler_svc.scheduler.prefix_cache import CacheNode, PrefixCache
from scheduler_svc.scheduler.request import Sequence
from shared_mem.enums import SpeculationMethod

_DRAFT_MODEL = SpeculationMethod.DRAFT_MODEL.bit


class PageAllocator:
    """Pages for sequences out of one pool. hidden_methods: bit mask of the drafters that read hidden states."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_context_tokens: int,
        use_prefix_cache: bool,
        hidden_methods: int = 0,
    ) -> None:
        self.ledger = PageLedger(num_pages)
        self.cache = PrefixCache(self.ledger)
        self.page_size = page_size
        self._max_context_tokens = max_context_tokens
        self._use_prefix_cache = use_prefix_cache
        self._hidden_methods = hidden_methods

    def pages_for(self, num_tokens: int) -> int:
        """Pages that cover num_tokens; nothing beyond the context limit is ever written."""
        return -(-min(num_tokens, self._max_context_tokens) // self.page_size)

    def find_prefix(self, sequence: Sequence, methods: int) -> list[CacheNode]:
        """The cached pages that an admission of `sequence` with the followers `methods` would hit; changes nothing.

        At most floor((n - 1) / page_size) pages: the last token is always computed, for its logits. The first page
        that lacks the KV of a follower that reads hidden states ends the hit: the target computes the rest again.
        """
        if not self._use_prefix_cache or not sequence.reuses_prefix:
            return []
        needed = methods & self._hidden_methods
        nodes: list[CacheNode] = []
        salt = sequence.request.submit.cache_salt
        for i in range((len(sequence.tokens) - 1) // self.page_size):
            node = self.cache.find(salt, nodes[-1] if nodes else None, sequence.page_key(i))
            if node is None or node.draft_kv & needed != needed:
                break
            nodes.append(node)
        return nodes

    def num_cached_tokens(self, sequence: Sequence, methods: int) -> int:
        """Tokens in the pages that find_prefix would give; for counting, at a small cost."""
        if not self._use_prefix_cache or not sequence.reuses_prefix:
            return 0
        num_pages = (len(sequence.tokens) - 1) // self.page_size
        prefix_ids = sequence.keys_of(num_pages).prefix_ids
        return self.page_size * self.cache.depth_of(prefix_ids, num_pages, methods & self._hidden_methods)

    def num_shareable_tokens(self, sequence: Sequence) -> int:
        """Leading prompt tokens that another sample of the same request could take from the cache."""
        if not self._use_prefix_cache or not sequence.reuses_prefix:
            return 0
        return (sequence.num_prompt_tokens - 1) // self.page_size * self.page_size

    def num_unheld(self, nodes: list[CacheNode]) -> int:
        """Of these pages, how many an admission would turn from evictable into owned."""
        return sum(self.ledger.references(node.page) == 0 for node in nodes)

    def admit(self, sequence: Sequence, prefix: list[CacheNode], methods: int) -> None:
        """Gives a sequence without pages its followers and its cached prefix (as find_prefix returned it)."""
        assert not sequence.pages, "a waiting sequence holds no pages"
        for node in prefix:
            self.cache.hold(node)
        sequence.pages = [node.page for node in prefix]
        sequence.cache_nodes = list(prefix)
        sequence.methods = methods
        sequence.leaves_cache_alone = False
        sequence.num_pages_sent = 0
        sequence.num_computed = len(prefix) * self.page_size
        with_draft_kv = 0
        if methods & _DRAFT_MODEL:
            while with_draft_kv < len(prefix) and prefix[with_draft_kv].draft_kv & _DRAFT_MODEL:
                with_draft_kv += 1
        sequence.num_draft_computed = with_draft_kv * self.page_size
        sequence.num_pages_marked = with_draft_kv

    def num_coverable_tokens(self, sequence: Sequence) -> int:
        """Tokens that the sequence's pages would cover if it took every available page."""
        return self._covered(len(sequence.pages) + self.ledger.num_available)

    def num_covered_tokens(self, sequence: Sequence) -> int:
        """Tokens that the sequence's pages cover."""
        return self._covered(len(sequence.pages))

    def _covered(self, num_pages: int) -> int:
        return min(num_pages * self.page_size, self._max_context_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the pages cover num_tokens, evicting cached ones; False (no change) if too few can be had."""
        missing = self.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.ledger.num_available:
            return False
        self.cache.evict(max(0, missing - self.ledger.num_free))
        sequence.pages.extend(self.ledger.take(missing))
        return True

    def trim(self, sequence: Sequence) -> None:
        """Gives back pages behind the one that takes the next token.

        Rows in flight keep pages for the case that all of their drafts are accepted: room for 1 + num_draft_tokens
        tokens for each sampling row, of which there are two at most. They write nothing behind that: what goes
        back needs no quarantine.
        """
        keep = max(self.pages_for(sequence.num_computed_at_most + 1), len(sequence.cache_nodes))
        for page in sequence.pages[keep:]:
            self.ledger.give_back(page, None)
        del sequence.pages[keep:]
        sequence.num_pages_sent = min(sequence.num_pages_sent, keep)

    def release(self, sequence: Sequence) -> None:
        """Takes all pages of a leaving sequence; steps in flight may still write private ones."""
        for page in sequence.pages[len(sequence.cache_nodes) :]:
            self.ledger.give_back(page, sequence.in_flight.last_step)
        self.cache.let_go(sequence.cache_nodes)
        sequence.pages = []
        sequence.cache_nodes = []

    def publish(self, sequence: Sequence) -> None:
        """Enters pages that retired steps completed into the prefix cache, so that others hit them at once.

        Only accepted tokens count: num_computed never covers rejected draft rows.
        """
        if not self._use_prefix_cache:
            return
        self._mark_draft_kv(sequence)
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self.page_size
        while len(sequence.cache_nodes) < num_full and not sequence.leaves_cache_alone:
            self._publish_page(sequence, len(sequence.cache_nodes))

    def _publish_page(self, sequence: Sequence, index: int) -> None:
        salt, key = sequence.request.submit.cache_salt, sequence.page_key(index)
        parent = sequence.cache_nodes[-1] if sequence.cache_nodes else None
        page = sequence.pages[index]
        # Drafters that read hidden states are as far as the target; the draft model says itself how far it is.
        own = needed = sequence.methods & self._hidden_methods
        if sequence.num_draft_computed > index * self.page_size:
            needed |= _DRAFT_MODEL
        if sequence.num_draft_computed >= (index + 1) * self.page_size:
            own |= _DRAFT_MODEL
        node = self.cache.find(salt, parent, key)
        if node is None:
            node = self.cache.insert(salt, parent, key, page, own)
        elif node.draft_kv & needed == needed:
            # Another sequence filled the same page meanwhile: share its copy and free ours, which steps in
            # flight still read and may fill with draft KV. They fill none that only our copy would have: where a
            # drafter follows it does so from the first row on, and then there would be draft KV by now.
            self.cache.hold(node)
            sequence.pages[index] = node.page
            sequence.num_pages_sent = min(sequence.num_pages_sent, index)
            self.ledger.give_back(page, sequence.in_flight.last_step)
        elif self.ledger.references(node.page) == 0 and own.bit_count() >= node.draft_kv.bit_count():
            # Sharing would lose draft KV that the worker counts on, and nobody holds the other copy: ours takes its
            # place, even if each holds KV that the other lacks: of as many methods, ours are the ones in use.
            self.cache.replace_page(node, page, own)
        else:
            sequence.leaves_cache_alone = True
            return
        sequence.cache_nodes.append(node)

    def _mark_draft_kv(self, sequence: Sequence) -> None:
        """The drafter may have caught up on shared pages that lacked its KV."""
        end = min(sequence.num_draft_computed // self.page_size, len(sequence.cache_nodes))
        for node in sequence.cache_nodes[sequence.num_pages_marked : end]:
            node.draft_kv |= _DRAFT_MODEL
        sequence.num_pages_marked = max(sequence.num_pages_marked, end)

    def check(self, running: Collection[Sequence]) -> None:
        """Recounts pages, references, the prefix tree and who has draft KV where.

        Raises LedgerError for what does not add up.
        """
        self.cache.check()
        self.ledger.check([sequence.pages for sequence in running], self.cache.pages())
        for sequence in running:
            needed = sequence.methods & self._hidden_methods
            for node in sequence.cache_nodes:
                if node.draft_kv & needed != needed:
                    raise LedgerError(f"page {node.page} lacks draft KV of slot {sequence.slot}'s followers")
