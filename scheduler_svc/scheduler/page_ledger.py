"""The one account of KV pages, which target and draft share: who holds which, and when it is free again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence


class LedgerError(AssertionError):
    """The account does not add up: a bug, never a condition to recover from."""


class PageLedger:
    """Every page is in exactly one state:

    free         nobody's; may be handed out
    owned        held by running sequences; by more than one only if it is a page of the prefix cache
    cached       in the prefix cache and held by nobody: evictable
    quarantined  held by nobody, but steps in flight may still write it; free once the last of them has retired
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # last in, first out: recently used memory is warm
        self._references = [0] * num_pages
        self._in_cache = [False] * num_pages
        self._quarantine: deque[tuple[int, int]] = deque()  # (last step that may write the page, page)
        self._retired_step = 0
        self._num_owned = 0
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_cached(self) -> int:
        """Evictable pages of the prefix cache."""
        return self._num_cached

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_available(self) -> int:
        """Pages that a plan may take now, evicting what is needed."""
        return len(self._free) + self._num_cached

    def references(self, page: int) -> int:
        """Running sequences that hold the page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Hands out `count` free pages with one reference each."""
        if count > len(self._free):
            raise LedgerError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self._num_owned += count
        return pages

    def share(self, page: int) -> None:
        """One more sequence holds a page of the prefix cache."""
        if not self._in_cache[page]:
            raise LedgerError(f"page {page} is private and cannot be shared")
        if self._references[page] == 0:
            self._num_cached -= 1
            self._num_owned += 1
        self._references[page] += 1

    def give_back(self, page: int, last_step: int | None) -> None:
        """A sequence lets go of a page that steps up to last_step (None: no step in flight) may write.

        A page of the prefix cache is complete, nobody writes it any more: it needs no quarantine.
        """
        if self._references[page] <= 0:
            raise LedgerError(f"page {page} is given back but nobody holds it")
        self._references[page] -= 1
        if self._references[page] > 0:
            return
        self._num_owned -= 1
        if self._in_cache[page]:
            self._num_cached += 1
        elif last_step is not None and last_step > self._retired_step:
            self._quarantine.append((last_step, page))
        else:
            self._free.append(page)

    def enter_cache(self, page: int) -> None:
        """A complete page, held by the sequence that filled it, may now be shared."""
        if self._in_cache[page] or self._references[page] == 0:
            raise LedgerError(f"page {page} cannot enter the cache")
        self._in_cache[page] = True

    def leave_cache(self, page: int) -> None:
        """An evicted page is free again."""
        if not self._in_cache[page] or self._references[page] > 0:
            raise LedgerError(f"page {page} cannot leave the cache: {self._references[page]} references")
        self._in_cache[page] = False
        self._num_cached -= 1
        self._free.append(page)

    def retire(self, step_id: int) -> None:
        """Steps up to step_id have finished on the worker: what only they could write is free."""
        self._retired_step = max(self._retired_step, step_id)
        still: deque[tuple[int, int]] = deque()
        for last_step, page in self._quarantine:
            if last_step > self._retired_step:
                still.append((last_step, page))
            else:
                self._free.append(page)
        self._quarantine = still

    def check(self, holders: Iterable[Sequence[int]], cache_pages: Iterable[int]) -> None:
        """Recounts everything from the page lists of all running sequences and of the prefix cache.

        Raises LedgerError for a page that is lost, in two states, or counted wrong.
        """
        held = Counter(page for pages in holders for page in pages)
        cached = set(cache_pages)
        state: dict[int, str] = {}
        for name, pages in (
            ("free", self._free),
            ("owned", list(held)),
            ("cached", [page for page in cached if page not in held]),
            ("quarantined", [page for _, page in self._quarantine]),
        ):
            for page in pages:
                if page in state:
                    raise LedgerError(f"page {page} is {state[page]} and {name}")
                state[page] = name
        if len(state) != self.num_pages:
            raise LedgerError(f"{self.num_pages - len(state)} pages are in no state")
        counts = Counter(state.values())
        if (self._num_owned, self._num_cached) != (counts["owned"], counts["cached"]):
            kept = f"owned {self._num_owned}, cached {self._num_cached}"
            raise LedgerError(f"counted {dict(counts)}, kept {kept}")
        for page in range(self.num_pages):
            if self._references[page] != held[page]:
                raise LedgerError(f"page {page}: {held[page]} holders, {self._references[page]} references")
            if self._in_cache[page] != (page in cached):
                raise LedgerError(f"page {page}: in the cache by one account only")
            if held[page] > 1 and page not in cached:
                raise LedgerError(f"page {page} is private and has {held[page]} holders")
