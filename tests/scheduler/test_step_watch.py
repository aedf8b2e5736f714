"""How long a step may go without a result, on a clock of the test's own."""

from __future__ import annotations

from scheduler_svc.scheduler.step_watch import OverdueStep, StepWatch


def _look(watch: StepWatch, begin: float, end: float) -> OverdueStep | None:
    """Two looks a second from begin to end; the last answer."""
    overdue = None
    for half_second in range(int((end - begin) * 2) + 1):
        overdue = watch.overdue(begin + half_second / 2)
    return overdue


def test_the_oldest_step_is_timed_from_when_it_could_begin() -> None:
    watch = StepWatch(10)
    watch.sent(1, 100.0)
    watch.sent(2, 100.0)
    assert _look(watch, 100.0, 109.0) is None
    watch.got_result(1, 109.0)
    assert _look(watch, 109.5, 119.0) is None, "step 2 began when step 1 ended"
    assert watch.overdue(119.5) == OverdueStep(2, 10.5)
    watch.got_result(2, 119.6)
    assert watch.overdue(1000.0) is None, "nothing runs"
    watch.sent(3, 1000.0)
    assert watch.overdue(1000.5) is None


def test_time_in_which_nobody_looked_counts_little() -> None:
    watch = StepWatch(10)
    watch.sent(1, 0.0)
    assert _look(watch, 0.0, 5.0) is None
    assert watch.overdue(10_000.0) is None, "both processes were stopped"
    assert _look(watch, 10_000.5, 10_004.0) is None
    assert watch.overdue(10_004.5) == OverdueStep(1, 10.5)
