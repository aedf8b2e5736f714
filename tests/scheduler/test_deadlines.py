"""When requests expire, and what the heap of deadlines keeps of those that ended."""

from __future__ import annotations

from scheduler_svc.scheduler.deadlines import Deadlines


def test_those_whose_time_is_over_come_once_and_in_order() -> None:
    deadlines = Deadlines()
    for serial, deadline in enumerate((5.0, 3.0, 9.0)):
        deadlines.add(serial, f"r{serial}", deadline)
    assert deadlines.next == 3.0
    assert deadlines.passed(2.9) == []
    assert deadlines.passed(5.0) == ["r1", "r0"]
    assert deadlines.passed(5.0) == []
    assert deadlines.next == 9.0


def test_an_ended_head_does_not_wake_anybody() -> None:
    deadlines = Deadlines()
    deadlines.add(1, "ends", 1.0)
    deadlines.add(2, "stays", 2.0)
    deadlines.discard(1)
    deadlines.discard(7)  # it had none
    assert deadlines.next == 2.0
    deadlines.discard(2)
    assert (deadlines.next, len(deadlines)) == (None, 0)
    for serial, name in enumerate(("passes", "ends", "stays"), 3):
        deadlines.add(serial, name, float(serial))
    deadlines.discard(4)
    assert deadlines.passed(3.0) == ["passes"]
    assert deadlines.next == 5.0


def test_the_heap_stays_small_behind_a_head_that_lives() -> None:
    deadlines = Deadlines()
    deadlines.add(0, "head", 0.0)
    for serial in range(1, 1000):
        deadlines.add(serial, f"r{serial}", float(serial))
        deadlines.discard(serial)
        assert len(deadlines) <= 65
    for serial in range(1000, 1500):
        deadlines.add(serial, f"r{serial}", float(serial))
    for serial in range(1000, 1400):
        deadlines.discard(serial)
    assert len(deadlines) <= 2 * 101 + 1
    assert deadlines.passed(2000.0) == ["head", *(f"r{serial}" for serial in range(1400, 1500))]
