"""Sequences that wait for a slot and pages, in the order in which they shall get them."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator

from scheduler_svc.scheduler.request import Request, Sequence

_Key = tuple[int, bool, float, int, int]


class WaitingQueue:
    """Higher priority first; within a priority the preempted ones, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Sequence]] = []
        self._per_request: Counter[int] = Counter()

    @property
    def num_requests(self) -> int:
        """Requests with at least one waiting sample."""
        return len(self._per_request)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Only the sequence that was given last may leave meanwhile, and none may come.

        Nothing is copied: each plan begins to go through the queue, and most soon stop.
        """
        at = 0
        while at < len(self._entries):
            entry = self._entries[at]
            yield entry[1]
            if at < len(self._entries) and self._entries[at] is entry:
                at += 1

    def push(self, sequence: Sequence) -> None:
        """Adds a new or preempted sequence."""
        bisect.insort(self._entries, (_key(sequence), sequence), key=lambda entry: entry[0])
        self._per_request[_id(sequence.request)] += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in the queue."""
        at = bisect.bisect_left(self._entries, _key(sequence), key=lambda entry: entry[0])
        assert self._entries[at][1] is sequence, "not in the waiting queue"
        del self._entries[at]
        serial = _id(sequence.request)
        self._per_request[serial] -= 1
        if not self._per_request[serial]:
            del self._per_request[serial]


def _id(request: Request) -> int:
    return request.serial


def _key(sequence: Sequence) -> _Key:
    priority, arrival, serial, index = sequence.rank
    return (priority, sequence.num_preemptions == 0, arrival, serial, index)
