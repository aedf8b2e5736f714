"""The order in which waiting sequences are served."""

from __future__ import annotations

import tracemalloc

from scheduler_svc.scheduler.request import Sequence, new_request
from scheduler_svc.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.harness import FRONTEND, make_limits, make_submit


class Arrivals:
    """Makes sequences that arrive one after the other."""

    def __init__(self) -> None:
        self._serial = 0

    def sequences(self, name: str, *, priority: int = 0, arrival: float = 0.0, n: int = 1) -> list[Sequence]:
        self._serial += 1
        submit = make_submit(name, [1, 2], priority=priority, arrival_time=arrival, n=n)
        return new_request(submit, FRONTEND, self._serial, make_limits()).sequences


def names(queue: WaitingQueue) -> list[str]:
    return [f"{sequence.request.request_id}.{sequence.index}" for sequence in queue]


def test_priority_then_arrival() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    for name, priority, arrival in (("late", 0, 2.0), ("low", -1, 0.0), ("early", 0, 1.0), ("high", 5, 9.0)):
        queue.push(arrivals.sequences(name, priority=priority, arrival=arrival)[0])
    assert names(queue) == ["high.0", "early.0", "late.0", "low.0"]


def test_preempted_ones_wait_in_front_of_their_priority() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    (early,) = arrivals.sequences("early", arrival=1.0)
    (preempted,) = arrivals.sequences("preempted", arrival=5.0)
    (high,) = arrivals.sequences("high", priority=1, arrival=9.0)
    preempted.num_preemptions = 1
    for sequence in (early, preempted, high):
        queue.push(sequence)
    assert names(queue) == ["high.0", "preempted.0", "early.0"]


def test_requests_are_counted_once_whatever_their_samples() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    samples = arrivals.sequences("three", n=3)
    for sequence in samples:
        queue.push(sequence)
    queue.push(arrivals.sequences("one")[0])
    assert (queue.num_requests, len(queue)) == (2, 4)
    for sequence in samples[:2]:
        queue.remove(sequence)
    assert (queue.num_requests, len(queue)) == (2, 2)
    queue.remove(samples[2])
    assert names(queue) == ["one.0"]
    assert queue.num_requests == 1


def test_equal_arrivals_keep_their_order_and_can_be_removed() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    sequences = [arrivals.sequences(str(i))[0] for i in range(5)]
    for sequence in reversed(sequences):
        queue.push(sequence)
    queue.remove(sequences[2])
    assert names(queue) == ["0.0", "1.0", "3.0", "4.0"]


def test_who_was_given_may_leave_and_nobody_is_left_out() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    sequences = [arrivals.sequences(str(i))[0] for i in range(6)]
    for sequence in sequences:
        queue.push(sequence)
    seen = []
    for sequence in queue:
        seen.append(sequence)
        if sequence not in sequences[1:3]:
            queue.remove(sequence)
    assert seen == sequences
    assert names(queue) == ["1.0", "2.0"]


def test_who_looks_at_the_first_only_copies_nothing() -> None:
    arrivals, queue = Arrivals(), WaitingQueue()
    for sequence in arrivals.sequences("many", n=2000):
        queue.push(sequence)
    tracemalloc.start()
    try:
        assert next(iter(queue)).index == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2000 * 8
