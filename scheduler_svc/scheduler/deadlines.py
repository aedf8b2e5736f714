"""When live requests expire: a heap of numbers, so that what has ended is kept by nobody."""

from __future__ import annotations

import heapq

_MIN_SIZE = 64  # a smaller heap is not worth rebuilding


class Deadlines:
    """Times by which requests, known by their serial numbers, must have ended."""

    def __init__(self) -> None:
        self._request_ids: dict[int, str] = {}  # by serial, of those that live
        self._heap: list[tuple[float, int]] = []  # (deadline, serial), also of some that have ended

    def __len__(self) -> int:
        """Entries of the heap, outdated ones among them."""
        return len(self._heap)

    def add(self, serial: int, request_id: str, deadline: float) -> None:
        """Takes in a request that begins to live. Serials are never used again, ids may be."""
        self._request_ids[serial] = request_id
        heapq.heappush(self._heap, (deadline, serial))

    def discard(self, serial: int) -> None:
        """Forgets a request that has ended; one without a deadline is unknown here."""
        if self._request_ids.pop(serial, None) is None:
            return
        # Entries behind a live head cannot be popped: drop them before they outnumber those that count.
        if len(self._heap) > max(_MIN_SIZE, 2 * len(self._request_ids)):
            self._heap = [entry for entry in self._heap if entry[1] in self._request_ids]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1] not in self._request_ids:
            heapq.heappop(self._heap)

    def passed(self, now: float) -> list[str]:
        """The ids of the live requests whose time is over, earliest deadline first; they are forgotten."""
        request_ids = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._request_ids):
            _, serial = heapq.heappop(self._heap)
            request_id = self._request_ids.pop(serial, None)
            if request_id is not None:
                request_ids.append(request_id)
        return request_ids

    @property
    def next(self) -> float | None:
        """The earliest deadline; None: nobody has one."""
        return self._heap[0][0] if self._heap else None
