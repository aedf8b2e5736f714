"""Decides, for both clients, whether and when a failed call is tried again."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from draftline.errors import DraftlineError, UnavailableError, invalid_field


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries a call again on UNAVAILABLE, as long as nothing of its answer was delivered.

    The wait doubles from initial_backoff to max_backoff seconds, varied by a fifth so that callers do not
    return in step; a wait the service asks for replaces it. max_attempts counts the first try: 1 is no retry.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.2
    max_backoff: float = 5.0

    def backoff(self, attempt: int) -> float:
        """Seconds to wait after failed attempt `attempt` (from 1) if the service asks for nothing else."""
        return min(self.initial_backoff * 2.0 ** (attempt - 1), self.max_backoff) * random.uniform(0.8, 1.2)


NO_RETRY = RetryPolicy(max_attempts=1)


class Attempts:
    """The tries of one call under one deadline."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        """timeout: seconds, None for no deadline. Raises InvalidArgumentError for NaN, which no clock reaches."""
        if timeout is not None and math.isnan(timeout):
            raise invalid_field("timeout", f"{timeout} is no number of seconds")
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._failed = 0

    def remaining(self) -> float | None:
        """Seconds until the deadline, None without one; gRPC ends a call at once if it is not positive."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def delay_or_raise(self, error: DraftlineError, *, delivered: bool = False) -> float:
        """Seconds to wait before the next try; raises `error` if there is to be none."""
        self._failed += 1
        if (
            delivered
            or not isinstance(error, UnavailableError)
            or not error.may_retry
            or self._failed >= self._policy.max_attempts
        ):
            raise error
        delay = self._policy.backoff(self._failed) if error.retry_after is None else error.retry_after
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            raise error
        return delay
