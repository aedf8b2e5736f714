"""How long the oldest step in flight has had no result: what a heartbeat from a thread of its own cannot tell."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LONGEST_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class OverdueStep:
    """A step that has run for longer than it may."""

    step_id: int
    seconds: float


class StepWatch:
    """Times the step that runs. Reads no clock: callers say what time it is, in monotonic seconds.

    A step begins when it is sent or, planned ahead, with the result of the one before it. Between two looks
    at most a second counts: time in which this process stood still too, stopped or starved, tells nothing.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._steps: deque[int] = deque()  # in flight, oldest first
        self._seconds = 0.0  # of the oldest one
        self._looked_at = 0.0

    def sent(self, step_id: int, now: float) -> None:
        """A plan went out, or is about to."""
        if not self._steps:
            self._begin(now)
        self._steps.append(step_id)

    def got_result(self, step_id: int, now: float) -> None:
        """A result came; results come in order."""
        if self._steps and self._steps[0] == step_id:
            self._steps.popleft()
            self._begin(now)

    def overdue(self, now: float) -> OverdueStep | None:
        """The oldest step if it has no result after the limit. Ask at least once a second while steps are in flight."""
        if not self._steps:
            return None
        self._seconds += min(now - self._looked_at, _LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return OverdueStep(self._steps[0], self._seconds) if self._seconds > self._limit else None

    def _begin(self, now: float) -> None:
        self._seconds, self._looked_at = 0.0, now
